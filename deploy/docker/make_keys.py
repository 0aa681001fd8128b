"""Service `keys`: makes what is missing of a federation's keys and hands everybody their own.

`python -m deploy.docker.make_keys DIR HOST SITE...`, with DIR/keys, DIR/superlink, DIR/operator
and DIR/sites/SITE on volumes. Done again it makes nothing new, but hands over what was renewed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from blend_core.errors import BlendError
from deploy.certificates import public_key_file
from deploy.keys import add_site, create_federation
from deploy.site_start import SETTINGS


def make_keys(folder: Path, host: str, sites: Sequence[str], images: bool) -> None:
    """Make the CA, the SuperLink's certificate and the sites' keys, and copy them to their places.

    Args:
        folder: holds `keys` (all keys, the CA's too), and the places `superlink`, `operator`
            (what it takes to register sites and start runs) and `sites/NAME`.
        host: name under which sites and operator reach the SuperLink.
        sites: client names.
        images: the sites bring images of their own.

    Raises:
        ConfigError, StateError: as `blend keys`.
    """
    federation = folder / "keys" / "federation"
    if not federation.exists():
        create_federation(federation, [host])
    for name in sites:
        if not public_key_file(federation, name).exists():
            add_site(federation, name)
        place = folder / "sites" / name
        _hand_over(federation / "sites" / name, place)
        if not images:
            settings = yaml.safe_load((place / SETTINGS).read_text(encoding="utf-8"))
            del settings["data-dir"]
            (place / SETTINGS).write_text(yaml.safe_dump(settings), encoding="utf-8")
    _hand_over(federation / "superlink", folder / "superlink")
    _hand_over(federation / "public-keys", folder / "operator" / "public-keys")
    shutil.copy2(federation / "superlink" / "ca.crt", folder / "operator")


def _hand_over(origin: Path, place: Path) -> None:
    # A volume cannot be renamed into; whoever reads it starts after this has ended.
    shutil.copytree(origin, place, dirs_exist_ok=True)


if __name__ == "__main__":
    try:
        # The built-in benchmark renders its images.
        make_keys(Path(sys.argv[1]), sys.argv[2], sys.argv[3:], os.environ["DATA_KIND"] != "shapes")
    except BlendError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
