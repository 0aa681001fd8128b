"""Finished runs on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_core.errors import ConfigError, RunError, printable

RESULTS = "results.json"
# Unfinished runs that are named; of others there is only the number.
_NAMED = 3

# A folder with one of these began as a run.
_SIGNS_OF_A_RUN = ("config.yaml", "events.jsonl")


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        folder: where it lies, as it was named.
        results: its results.json; its parts have the types that `read_results` checks.
    """

    folder: Path
    results: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.results["seed"])

    @property
    def method(self) -> str:
        """The name of its method."""
        return str(self.results["config"]["method"]["name"])


def load_runs(paths: Iterable[Path], tell: Callable[[str], None] | None = None) -> list[Run]:
    """Read the runs that are named, or lie somewhere below the folders that are named.

    Args:
        paths: run folders, results.json files, or folders that hold runs.
        tell: receives a line for each run that cannot be read, and one for all unfinished ones;
            None: the first run that would be left out is an error.

    Returns:
        The runs, in the order of the paths and sorted below a folder; each file once.

    Raises:
        ConfigError: a path does not exist.
        RunError: a run cannot be read or is unfinished, and `tell` is None.
    """
    runs: dict[Path, Run] = {}
    unfinished: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder; name a run or a folder of runs")
        found = False
        for file in _result_files(path):
            found = True
            if file.resolve() in runs:
                continue
            try:
                runs[file.resolve()] = _read_run(file)
            except _UnfinishedError:
                if tell is None:
                    raise
                unfinished.setdefault(file.resolve(), file.parent)
            except RunError as error:
                if tell is None:
                    raise
                tell(printable(str(error)))
        if not found:
            line = f"{path}: holds no run (a folder with {RESULTS})"
            if tell is None:
                raise RunError(line)
            tell(printable(line))
    if tell is not None and unfinished:
        tell(printable(_one_line(list(unfinished.values()))))
    return list(runs.values())


class _UnfinishedError(RunError):
    """A run has begun, but there are no results (yet)."""


def _one_line(folders: Sequence[Path]) -> str:
    """How many unfinished runs there are, and where the first ones lie."""
    count = f"{len(folders)} unfinished run{'' if len(folders) == 1 else 's'}"
    rest = len(folders) - _NAMED
    named = ", ".join(map(str, folders[:_NAMED])) + (f" and {rest} more" if rest > 0 else "")
    return f"{count} without {RESULTS}: {named}"


def _result_files(path: Path) -> Iterator[Path]:
    """The results files at or below a path, also where a run should have left one."""
    if path.is_file():
        yield path
        return
    for folder, below, files in os.walk(path):
        if RESULTS in files or any(sign in files for sign in _SIGNS_OF_A_RUN):
            yield Path(folder) / RESULTS
            below.clear()  # What lies in a run's folder belongs to the run.
        below[:] = sorted(name for name in below if not name.startswith("."))


def _read_run(file: Path) -> Run:
    from blend_core.report.results_file import read_results

    try:
        return Run(file.parent, read_results(file))
    except FileNotFoundError:
        raise _UnfinishedError(f"{file.parent}: unfinished, there is no {RESULTS}") from None
