"""Child processes with a log each, and an end that leaves none of their descendants behind.

Flower's processes start further processes, some in sessions of their own, and a site's worker
outlives the process that started it. They are found by a marker in their environment, which all
descendants inherit, and by their ancestry (Flower hides the environment of its SuperExec).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from blend_core.errors import RunError
from deploy.relatives import MARKER, ProcessId, processes, relatives
from deploy.signals import uninterrupted

# Seconds. Flower's processes hold nothing that could be lost, but say good-bye to each other.
OWN_PATIENCE = 1.0
FAILED_PATIENCE = 2.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The last line of a traceback; then what programs write when something is wrong.
_TELLING = (
    re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt|Expired): "),
    re.compile(
        r"^(?!INFO|WARN|DEBUG|Error$).*(error|exception|refused|denied|in use|failed)",
        re.IGNORECASE,
    ),
    re.compile(r"\w"),
)


class Child:
    """One process that we started, in its own session, with its output in a log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, start: int) -> None:
        self.name = name
        self.process = process
        self.log = log
        self._start = start

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def output(self) -> str:
        """What the process has written so far, without colours."""
        return read_log(self.log, self._start)

    def ending(self) -> str:
        """How it ended and the lines of its log that say why, in one line."""
        code = self.process.poll()
        if code is not None and code < 0:  # Killed from outside; its log does not know why.
            return f"(signal {-code}); see {self.log}"
        return f"(exit code {code}): {telling_lines(self.output())}; see {self.log}"


class Family:
    """All processes of one run. Leaving the `with` block ends them and their descendants.

    Args:
        environment: of every process; its `MARKER` names the run.
        logs: folder for one log per process.
        scratch: a folder that is removed when all have ended.
        patience: seconds that descendants get to end by themselves before they are killed.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        logs: Path,
        scratch: Path | None = None,
        patience: float = 5.0,
    ) -> None:
        self.environment = dict(environment)
        self.logs = logs
        self.scratch = scratch
        self.patience = patience
        self.children: list[Child] = []
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Family:
        # Ends the family should this process be killed without a chance to do it.
        unmarked = {k: v for k, v in self.environment.items() if k != MARKER}
        scratch = [str(self.scratch)] if self.scratch else []
        self._reaper = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.reaper", self.environment[MARKER], *scratch],
            env=unmarked,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with uninterrupted():
            if error is not None:  # A failed run has nothing to wait for: its files are whole.
                self.patience = min(self.patience, FAILED_PATIENCE)
            self.stop()
            if self.scratch is not None:
                shutil.rmtree(self.scratch, ignore_errors=True)
            if self._reaper is not None and self._reaper.stdin is not None:
                self._reaper.kill()
                self._reaper.stdin.close()
                self._reaper.wait()

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start a process. A second one of the same name continues the same log.

        Raises:
            RunError: it cannot be started.
        """
        path = self.logs / f"{name}.log"
        with path.open("ab") as log:
            begin = log.tell()  # Before the process is there: it may write, and end, at once.
            try:
                process = subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C in the terminal must reach the launcher only, which then ends all.
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(f"{command[0]} cannot be started: {error.strerror}") from None
        child = Child(name, process, path, begin)
        self.children.append(child)
        return child

    def stop(self) -> None:
        """End all processes: ask, wait up to `patience` seconds, then kill what is left."""
        # Of those that run: the ids of others may meanwhile be somebody else's.
        own = {child.process.pid for child in self.children if child.running}
        known = relatives(self.environment[MARKER], own)
        _signal(known, own, signal.SIGTERM)
        known = self._wait(known, own, OWN_PATIENCE)
        _signal({process for process in known if process[0] in own}, own, signal.SIGKILL)
        known = self._wait(known, own, self.patience)
        # Killed ones may have started others meanwhile, so look until nothing is found.
        for _ in range(20):
            if not known:
                break
            _signal(known, own, signal.SIGKILL)
            known = self._wait(known, own, 0.5)
        self.children.clear()

    def _wait(self, known: set[ProcessId], own: set[int], seconds: float) -> set[ProcessId]:
        """Wait until all have ended or the time is over; return those that have not."""
        deadline = time.monotonic() + seconds
        while True:
            for child in self.children:
                child.process.poll()  # An ended child stays a process until it is asked for.
            table = processes()
            found = relatives(self.environment[MARKER], own, table)
            known = {process for process in known if process in table} | found
            if not known or time.monotonic() >= deadline:
                return known
            time.sleep(0.05)


def telling_lines(text: str, count: int = 2) -> str:
    """The last lines of a log that look like a reason, else its last lines; one line."""
    lines = [line.strip(" \t│╭╮╰╯─") for line in text.splitlines()]  # Flower draws boxes.
    for pattern in _TELLING:
        if chosen := [line[:300] for line in lines if pattern.search(line)]:
            return " | ".join(chosen[-count:])
    return "no output"


def read_log(path: Path, start: int = 0) -> str:
    """Text of a log from byte `start` on, without colours; "" if there is none."""
    try:
        return _COLOUR.sub("", path.read_bytes()[start:].decode("utf-8", errors="replace"))
    except OSError:
        return ""


def _signal(known: set[ProcessId], own: set[int], number: signal.Signals) -> None:
    for pid, _ in known:
        with suppress(ProcessLookupError, PermissionError):
            # Ours lead a process group; whatever runs in it goes with them.
            (os.killpg if pid in own else os.kill)(pid, number)
