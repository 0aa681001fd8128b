"""What lies in a sweep's folder: who owns it, which runs are finished, what may be removed.

`OUT/sweep.json` records the sweep; `OUT/CELL/seed-N/` is an ordinary run folder, beside it lie the
run's settings (`seed-N.json`) and its output (`seed-N.log`).
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend_core import __version__
from blend_core.errors import ConfigError, RunError
from deploy.grid import Cell
from deploy.options import MANIFEST
from deploy.relatives import relatives

if TYPE_CHECKING:
    from blend_core.config import Experiment

RECORD = "sweep.json"
# What a run of any engine writes into its folder; anything else is somebody's and is kept.
RUN_FILES = {"config.yaml", "events.jsonl", "lock", MANIFEST, "results.json"}
RUN_FOLDERS = {"checkpoints", "state", "flower", "logs"}
MARKERS = r"sweep-[0-9a-f]{16}"
# Seconds in which the runs of a sweep that was killed have ended, too; their reaper takes less.
FAREWELL_SECONDS = 30.0


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Own a sweep's folder, which is created or was a sweep's before, for a `with` block.

    Raises:
        ConfigError: it holds something else, or another sweep owns it.
        RunError: runs of an earlier sweep do not end.
    """
    from blend_core.state import StateError, lock_folder

    try:
        names = {path.name for path in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder you may use") from None
    if not names <= {"lock"} and RECORD not in names:
        raise ConfigError(f"--out {out}: not empty and no sweep's folder; name a new one")
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(out))
        except StateError as error:
            raise ConfigError(f"--out {error}") from None
        _wait_for_earlier(out)
        yield


def write_record(out: Path, facts: Mapping[str, Any]) -> None:
    """Replace the sweep's record: its "marker" (see `deploy.relatives`) and what people want.

    Raises:
        RunError: it cannot be written; the earlier record is untouched.
    """
    from blend_core.state import StateError, write_json_atomic

    try:
        write_json_atomic(out / RECORD, {"version": __version__, **facts})
    except StateError as error:  # No site's state.
        raise RunError(str(error)) from None


def run_folder(out: Path, cell: Cell) -> Path:
    """Where the run of a cell lies."""
    return out / cell.folder / f"seed-{cell.seed}"


def finished_results(folder: Path, experiment: Experiment) -> dict[str, Any] | None:
    """Results of a finished run of exactly this experiment and version; None if there are none."""
    from blend_core.report.results_file import read_results

    try:
        results = read_results(folder / "results.json")
    except (FileNotFoundError, RunError):
        return None
    same = results["config"] == experiment.to_json() and results.get("version") == __version__
    return results if same else None


def foreign_content(folder: Path) -> str | None:
    """Name of something in the place of a run that no run has written; None if there is none."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return str(folder)
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        unfinished = path.name.startswith(".") and path.name.endswith(".tmp")
        known = RUN_FOLDERS if path.is_dir() and not path.is_symlink() else RUN_FILES
        if path.name not in known and not unfinished:
            return str(path)
    return None


def clear(folder: Path) -> None:
    """Remove what an earlier run of a cell has left.

    Raises:
        RunError: there is something in it that no run has written, or it cannot be removed.
    """
    from blend_core.state import make_folder

    make_folder(folder.parent)
    if (foreign := foreign_content(folder)) is not None:
        raise RunError(f"{foreign}: is no part of a run and is not overwritten; move it away")
    if folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise RunError(f"{folder}: cannot be removed: {error.strerror}") from None


def _wait_for_earlier(out: Path) -> None:
    """A killed sweep's runs end a little later; two runs must not write into one folder."""
    path = out / RECORD
    if not path.exists():
        return
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))["marker"]
        if not re.fullmatch(MARKERS, marker):
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path}: is no record of a sweep; name a new folder") from None
    deadline = time.monotonic() + FAREWELL_SECONDS
    while left := relatives(marker, set()):
        if time.monotonic() > deadline:
            listed = ", ".join(str(pid) for pid, _ in sorted(left))
            raise RunError(f"{out}: processes of an earlier sweep still run: {listed}; end them")
        time.sleep(0.1)
