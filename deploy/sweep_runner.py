"""Runs the cells of a sweep, several at a time, each as `blend run` in a process of its own."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from blend_core.errors import BlendError, ConfigError, RunError, one_line
from deploy.children import Child, Family, telling_lines
from deploy.events import EventTail
from deploy.grid import Cell, Sweep, labels, resolve
from deploy.options import Engine
from deploy.relatives import MARKER
from deploy.signals import uninterrupted
from deploy.sweep_folder import (
    clear,
    finished_results,
    foreign_content,
    owned,
    run_folder,
    write_record,
)
from deploy.sweep_view import SweepView

if TYPE_CHECKING:
    from blend_core.config import Experiment

DAY = 86400.0
LOOK_SECONDS = 0.1
# Seconds in which a run that is asked to end has ended its own processes.
END_SECONDS = 20.0
# "done" now, "reused" from an earlier sweep.
Status = Literal["done", "failed", "reused"]


@dataclass(frozen=True)
class CellResult:
    """What came of a cell.

    Attributes:
        folder: of the run; holds results.json unless it failed.
        reason: why it failed, one line; else "".
    """

    status: Status
    folder: Path
    reason: str = ""

    @property
    def log(self) -> Path:
        """The run's output."""
        return self.folder.with_name(f"{self.folder.name}.log")


def run_sweep(
    sweep: Sweep,
    out: Path,
    jobs: int | None,
    console: Console,
    engine: Engine = Engine.LOOP,
    cell_timeout: float = DAY,
) -> dict[Cell, CellResult]:
    """Run all cells that have not finished in `out`; a failing one does not stop the others.

    Args:
        sweep: the cells.
        out: new folder, or that of an earlier sweep.
        jobs: runs at a time, from 1; None: as the machine allows.
        console: where progress is shown.
        engine: of every run; the numbers are the same.
        cell_timeout: seconds after which a run is ended and counts as failed.

    Returns:
        What came of every cell, in the order of the sweep.

    Raises:
        ConfigError: a cell is wrong, or `out` cannot be used; nothing has been started.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs {jobs}: must be at least 1")
    with uninterrupted():  # A signal in the middle of an import may be swallowed by it.
        experiments = resolve(sweep)
    out = out.expanduser().absolute()
    with owned(out):
        return _Runner(sweep, experiments, out, console, engine, cell_timeout).run(
            jobs or _jobs(experiments.values(), engine)
        )


@dataclass(frozen=True)
class _Run:
    """A run that goes on; `deadline` is in seconds of the monotonic clock."""

    child: Child
    tail: EventTail
    deadline: float


class _Runner:
    """One pass over the cells of a sweep whose folder is ours."""

    def __init__(
        self,
        sweep: Sweep,
        experiments: Mapping[Cell, Experiment],
        out: Path,
        console: Console,
        engine: Engine,
        timeout: float,
    ) -> None:
        self.experiments = experiments
        self.out = out
        self.console = console
        self.engine = engine
        self.timeout = timeout
        self.names = labels(sweep.cells)
        self.results: dict[Cell, CellResult] = {}
        self.marker = f"sweep-{secrets.token_hex(8)}"
        self.facts = {"marker": self.marker, "base": sweep.base, "engine": engine}
        self.view = SweepView(console, self.names)

    def run(self, jobs: int) -> dict[Cell, CellResult]:
        """Run what has not finished, `jobs` at a time."""
        finished = {}
        for cell, experiment in self.experiments.items():
            folder = run_folder(self.out, cell)
            finished[cell] = finished_results(folder, experiment)
            if finished[cell] is None and (foreign := foreign_content(folder)) is not None:
                raise ConfigError(f"{foreign}: is no part of a run and stands in its way; move it")
        waiting = deque(cell for cell, results in finished.items() if results is None)
        self.console.print(
            f"{len(finished)} runs, {len(waiting)} to do, {min(jobs, len(waiting))} at a time, "
            f"out {self.out}",
            markup=False,
            soft_wrap=True,
        )
        self._record()
        running: dict[Cell, _Run] = {}
        environment = {**os.environ, MARKER: self.marker}
        with self.view, Family(environment, self.out) as family:
            try:
                for cell, results in finished.items():
                    if results is not None:
                        self._ended(cell, "reused", results=results)
                while waiting or running:
                    while waiting and len(running) < jobs:
                        cell = waiting.popleft()
                        if (run := self._start(family, cell)) is not None:
                            running[cell] = run
                    time.sleep(LOOK_SECONDS)
                    running = {
                        cell: run for cell, run in running.items() if self._goes_on(cell, run)
                    }
            finally:
                _end([run.child for run in running.values()])
        return {cell: self.results[cell] for cell in self.experiments}

    def _start(self, family: Family, cell: Cell) -> _Run | None:
        """Start the run of a cell; None if that fails."""
        from blend_core.state import write_json_atomic

        folder = run_folder(self.out, cell)
        try:
            clear(folder)
            settings = folder.with_name(f"{folder.name}.json")  # JSON is YAML.
            write_json_atomic(settings, self.experiments[cell].to_json())
            command = [sys.executable, "-P", "-m", "deploy.cli", "run", str(settings)]
            options = ["--engine", self.engine, "--out", str(folder)]
            child = family.start(f"{cell.folder}/{folder.name}", [*command, *options])
        except BlendError as error:
            self._ended(cell, "failed", str(error))
            return None
        except OSError as error:  # Of its log.
            self._ended(cell, "failed", f"{error.filename}: {error.strerror}")
            return None
        self.view.started(cell)
        return _Run(child, EventTail(folder), time.monotonic() + self.timeout)

    def _goes_on(self, cell: Cell, run: _Run) -> bool:
        """Follow a run; False when it has come to an end, whatever that is."""
        over = not run.child.running
        for event in run.tail.read():
            self.view.event(cell, event)
        if not over and time.monotonic() < run.deadline:
            return True
        if not over:
            _end([run.child])
        results = finished_results(run_folder(self.out, cell), self.experiments[cell])
        if results is not None:
            self._ended(cell, "done", results=results)
        elif over:
            self._ended(cell, "failed", _reason(run.child))
        else:
            self._ended(cell, "failed", f"not finished within {self.timeout:.0f} s; it was ended")
        return False

    def _ended(
        self,
        cell: Cell,
        status: Status,
        reason: str = "",
        results: Mapping[str, Any] | None = None,
    ) -> None:
        self.results[cell] = CellResult(status, run_folder(self.out, cell), reason)
        try:
            self._record()
        except RunError as error:  # E.g. a full disk: the other cells and the summary go on.
            reason = f"{reason}; {error}" if reason else str(error)
            status, results = "failed", None
            self.results[cell] = CellResult(status, run_folder(self.out, cell), reason)
        self.view.ended(cell, status, reason, results)

    def _record(self) -> None:
        """Write down what is known of every cell."""
        cells = []
        for cell, name in self.names.items():
            result = self.results.get(cell)
            cells.append(
                {
                    "label": name,
                    "seed": cell.seed,
                    "settings": dict(cell.settings),
                    "folder": str(run_folder(Path(), cell)),
                    "status": result.status if result else None,
                    "reason": result.reason if result else "",
                }
            )
        write_record(self.out, {**self.facts, "cells": cells})


def _jobs(experiments: Iterable[Experiment], engine: Engine) -> int:
    """How many runs the processor's cores allow; on GPUs one, because memory decides."""
    known = list(experiments)
    if any(experiment.train.device != "cpu" for experiment in known):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    clients = (1 if engine is Engine.LOOP else experiment.clients for experiment in known)
    threads = (
        experiment.train.threads * at_a_time
        for experiment, at_a_time in zip(known, clients, strict=True)
    )
    return max((cores or 1) // max(threads, default=1), 1)


def _end(children: Iterable[Child]) -> None:
    """Ask runs to end, which then end their own processes; kill those that do not in time."""
    with uninterrupted():
        left = [child for child in children if child.running]
        for child in left:
            child.process.terminate()
        deadline = time.monotonic() + END_SECONDS
        while any(child.running for child in left) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in left:
            if child.running:
                child.process.kill()
                child.process.wait(END_SECONDS)


def _reason(child: Child) -> str:
    """Why a run ended: its own words, else what can be seen from outside."""
    output = child.output()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if errors:
        return one_line(errors[-1].removeprefix("error: "))
    code = child.process.returncode
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}: {telling_lines(output)}"
