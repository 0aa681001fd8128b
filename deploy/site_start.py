"""`blend site start`: a SuperNode from the folder that a site was handed, by TLS or not at all."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from blend_core.errors import ConfigError, SiteError
from deploy.options import split_address

SETTINGS = "site.yaml"
CA = "ca.crt"
KEY = "node.key"
# Flower's own, of the SuperNode's local API; a second SuperNode on a machine needs another.
RUNTIME_PORT = 9094


def start(
    folder: Annotated[
        Path, typer.Argument(help=f"The site's folder: {SETTINGS}, {CA}, {KEY}.")
    ] = Path(),
) -> None:
    """Start this site's SuperNode, encrypted and with the site's key.

    It tries until the SuperLink answers, and stays. Flower's --insecure is never passed.
    """
    command = supernode_command(folder)
    print(shlex.join(command), flush=True)
    # This process becomes the SuperNode, so that signals reach it and its end is seen.
    os.execve(command[0], command, _environment())


def supernode_command(folder: Path) -> list[str]:
    """The SuperNode's command line, after a check of all that the site's folder holds.

    Args:
        folder: made by `blend keys add-site`; its `site.yaml` was filled in at the site.

    Raises:
        ConfigError: `site.yaml` is wrong.
        SiteError: key, certificate or images are missing or unusable.
    """
    from client.policy import site_policy
    from client.site import Site
    from deploy.engine import script
    from deploy.node_config import node_config

    folder = folder.absolute()
    values = read_settings(folder)
    superlink = values.pop("superlink", None)
    port = values.pop("port", RUNTIME_PORT)
    split_address(f"{folder / SETTINGS}: superlink", superlink)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ConfigError(f"{folder / SETTINGS}: port = {port!r}: must be from 1 to 65535")
    site = Site.from_node_config(values)
    site_policy(site)  # A wrong one would refuse every request, and say why only in a log.
    if site.data_dir is not None and not site.data_dir.is_dir():
        raise SiteError(
            f"data-dir {site.data_dir} is no folder; write yours in {folder / SETTINGS}"
        )
    _check_keys(folder)
    return [
        script("flower-supernode"),
        *("--superlink", str(superlink)),
        *("--root-certificates", str(folder / CA)),
        *("--auth-supernode-private-key", str(folder / KEY)),
        *("--port", str(port)),
        *("--node-config", node_config(values)),
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """What the `site.yaml` of a site's folder says.

    Raises:
        ConfigError: it is missing, no YAML, or a key has no value or no plain one.
    """
    from blend_core.settings import yaml_value

    path = folder / SETTINGS
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; blend keys add-site makes a site's folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    values = yaml_value(text, str(path))  # Refuses a key that is given twice.
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: must hold lines of `key: value`, e.g. data-dir: /data/photos")
    for key, value in values.items():
        if value is None:  # A policy without its file must not become none at all.
            raise ConfigError(f"{path}: {key} has no value; give one, or remove the line")
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise ConfigError(f"{path}: {key} = {value!r}: must be a text, number, true or false")
    return values


def _check_keys(folder: Path) -> None:
    """The checks of `blend doctor`: failures are raised, warnings printed."""
    from deploy.checks.keys import root_certificates, site_key

    for check in (root_certificates(folder / CA), site_key(folder / KEY)):
        line = f"{check.found}; {check.advice}"
        if check.level == "failure":
            raise SiteError(line)
        if check.level == "warning":
            print(f"warning: {line}", flush=True)


def _environment() -> dict[str, str]:
    """Ours, without what Flower would otherwise send to the internet."""
    from deploy.engine import script

    scripts = str(Path(script("flower-supernode")).parent)
    path = os.environ.get("PATH", os.defpath)
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        **os.environ,
        # Flower starts its helpers by name.
        "PATH": os.pathsep.join([scripts, path]),
    }
