"""The folder of one run, and the configuration that is printed and kept in it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from blend_core.config import Experiment
from blend_core.errors import FULL, ConfigError
from blend_core.report.runs import RESULTS
from blend_core.settings import load_experiment
from blend_core.state import StateError, lock_folder, write_bytes_atomic
from deploy.options import Engine
from server.checkpoints import Checkpoint, Checkpoints, require_same

# The resolved configuration of a run, in its folder.
CONFIG = "config.yaml"


def prepare_folder(out: Path | None, experiment: Experiment) -> Path:
    """Create the run's folder, store the resolved configuration in it, return its full path.

    Raises:
        ConfigError: it holds something already, or cannot be written.
    """
    if out is None:
        name = f"{experiment.method.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        out = Path("runs") / name
        number = 2
        while out.exists():  # Two runs in the same second.
            out = Path("runs") / f"{name}-{number}"
            number += 1
    out = out.expanduser().absolute()
    try:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out}: is a file; name a new folder")
        if out.exists() and any(out.iterdir()):
            again = f", or go on with it: --resume {out}" if (out / CONFIG).is_file() else ""
            raise ConfigError(
                f"--out {out}: not empty; name a new folder, or remove this one{again}"
            )
        out.mkdir(parents=True, exist_ok=True)
        # "x": of two runs that found the folder empty at the same moment, one gets it.
        with (out / CONFIG).open("x", encoding="utf-8") as file:
            try:
                file.write(_yaml(experiment.to_json()))
                file.flush()
            except OSError:
                (out / CONFIG).unlink()  # So that the same command can be given again.
                raise
    except FileExistsError:
        raise ConfigError(f"--out {out}: another run has just taken it; start again") from None
    except OSError as error:
        if error.errno in FULL:
            what = f"{out}: cannot be written: {error.strerror}; make room, then start again"
            raise StateError(what) from None
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder you may write") from None
    return out


def store_config(folder: Path, experiment: Experiment) -> None:
    """Replace the configuration of a run that goes on. Raises `StateError`."""
    write_bytes_atomic(folder / CONFIG, _yaml(experiment.to_json()).encode())


def reopen_folder(
    folder: Path, overrides: Sequence[str]
) -> tuple[Path, Experiment, Checkpoint | None]:
    """The folder, experiment and newest checkpoint of a run that is to go on.

    Args:
        folder: the run's folder.
        overrides: `key=value` texts; see `require_same` for what may change.

    Raises:
        ConfigError: there is no run, or it would be another experiment.
        StateError: its checkpoints are damaged, or it still runs.
    """
    folder = folder.expanduser().absolute()
    config = folder / CONFIG
    if not config.is_file():
        raise ConfigError(f"--resume {folder}: no run is there ({CONFIG} is missing)")
    if config.stat().st_size == 0:
        raise ConfigError(f"--resume {folder}: {CONFIG} is empty (a full disk?); begin a new run")
    experiment = load_experiment(str(config), overrides)
    checkpoints = Checkpoints(folder)
    if checkpoints.exist():
        with lock_folder(checkpoints.generations.folder):  # Before anything of it is changed.
            pass
    before = checkpoints.newest()
    if before is not None:
        require_same(experiment, before)
        if before.engine not in list(Engine):
            raise ConfigError(
                f"--resume {folder}: the run was submitted with flwr run; submit it again with "
                "resume=true in its --run-config"
            )
    return folder, experiment, before


def finished(folder: Path, experiment: Experiment) -> bool:
    """Whether the run has results of as many rounds as the experiment asks for."""
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return bool(results["config"]["rounds"] == experiment.rounds)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Add to whatever ends the block early how the run can go on, if anything is left of it."""
    try:
        yield
    except BaseException as error:
        if Checkpoints(folder).newest_round():
            error.add_note(
                f"every finished round is kept: blend run --resume {shlex.quote(str(folder))}"
            )
        raise


def compact_yaml(experiment: Experiment) -> str:
    """The resolved configuration, one paragraph per group of settings; still YAML."""
    lines = []
    for key, value in experiment.to_json().items():
        text = _yaml(value, flow_style=True) if isinstance(value, dict) else json.dumps(value)
        lines.append(f"{key}: {text.strip()}")
    return "\n".join(lines)


def _yaml(data: dict[str, Any], flow_style: bool = False) -> str:
    return str(
        yaml.safe_dump(
            data, sort_keys=False, default_flow_style=flow_style, allow_unicode=True, width=70
        )
    )
