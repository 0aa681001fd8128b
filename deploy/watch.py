"""Follows a submitted run to its end, whatever that end is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blend_core.config import ServerConfig
from blend_core.errors import BlendError, RunError, error_from_code
from blend_core.report.runs import RESULTS
from client.process import PROC, process_status
from deploy.children import Child, read_log, telling_lines
from deploy.events import Event, EventTail, OnEvent
from deploy.relatives import is_running

LOOK_SECONDS = 0.1
# Between the death of a process and the last lines that it and others wrote.
SETTLE_SECONDS = 1.0
# After a ServerApp's end, for what it wrote to come here through the SuperLink.
LAST_WORDS_SECONDS = 3.0
# Flower's processes in which a ServerApp runs; Linux knows 15 characters of a name.
APPS = ("flwr-serverapp", "flwr-simulation")
RAY = ("raylet", "gcs_server")
# A look through all processes costs some milliseconds.
RAY_LOOK_SECONDS = 1.0
# On top of the server's own deadlines, after which silence means that it hangs.
SILENCE_SECONDS = 300.0


class Watch:
    """Waits for a run's end and says why it failed.

    Args:
        out: the run's folder.
        superlink: the SuperLink's process.
        submission: the `flwr run` process, which ends when the run does.
        server: the run's own deadlines.
        start_timeout: seconds that the ServerApp may take to start.
        on_event: called with every event of the journal, and with warnings.
        check: called several times a second; raises when the run cannot go on.
        resume: the run goes on in a folder that has events already.
    """

    def __init__(
        self,
        out: Path,
        superlink: Child,
        submission: Child,
        server: ServerConfig,
        start_timeout: float,
        on_event: OnEvent,
        check: Callable[[], None] = lambda: None,
        resume: bool = False,
    ) -> None:
        self.out = out
        self.tail = EventTail(out, resume)
        self.superlink = superlink
        self.submission = submission
        self.start_timeout = start_timeout
        self.silence = max(server.formation_timeout, server.round_timeout) + SILENCE_SECONDS
        self.on_event = on_event
        self.check = check
        self.pid: int | None = None
        self._before = self._results()
        # Flower's process with the ServerApp, and when it was first seen to have ended.
        self._app: int | None = None
        self._died: float | None = None
        self._ray = False
        self._looked = 0.0
        self._heard = time.monotonic()

    def until_end(self) -> None:
        """Return when the run has finished.

        Raises:
            BlendError: the run failed, with the server's own words and exit code where it left
                any; else which process ended or was silent, and the last lines of its log.
        """
        while not self._finished():
            if (trouble := self._trouble()) is not None:
                # The journal's last word, if there is one, explains more than a process's end.
                time.sleep(SETTLE_SECONDS)
                # Results are the last thing written; a full disk may have cost the journal its end.
                if self._finished() or self._results() != self._before:
                    return
                raise trouble
            self.check()
            time.sleep(LOOK_SECONDS)

    def _finished(self) -> bool:
        finished = False
        for event in self.tail.read():
            self._heard = time.monotonic()
            self.on_event(event)
            if event["event"] == "started":
                self.pid = int(event["pid"])
                self._ray = event.get("engine") == "simulation"
            if event["event"] == "failed":
                raise error_from_code(str(event["message"]), int(event["exit_code"]))
            finished = finished or event["event"] == "finished"
        return finished

    def _results(self) -> tuple[int, int] | None:
        """What tells the file of results from another; None: there is none."""
        try:
            found = (self.out / RESULTS).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _trouble(self) -> BlendError | None:
        silent = time.monotonic() - self._heard
        if not self.superlink.running:
            return RunError(f"the SuperLink ended {self.superlink.ending()}")
        if self.pid is None:
            if not self.submission.running:
                return RunError(f"the run did not start {self.submission.ending()}")
            if self._app_has_died():
                return RunError(f"the ServerApp ended at its start: {_why(self.submission)}")
            if silent > self.start_timeout:
                lines = telling_lines(read_log(self.submission.log))
                return RunError(
                    f"the ServerApp did not start within {self.start_timeout:.0f} s: {lines}; "
                    f"see {self.submission.log}"
                )
        elif (dead := self._dead_part_of_ray(self.pid)) is not None:
            return RunError(f"Ray's process {dead} ended, killed from outside or out of memory")
        elif not is_running(self.pid):
            return RunError(f"the ServerApp ended without a result: {_why(self.submission)}")
        elif silent > self.silence:
            return RunError(
                f"the ServerApp has been silent for {silent:.0f} s; see {self.submission.log}"
            )
        return None

    def _app_has_died(self) -> bool:
        """Whether Flower's process with the ServerApp ended a while ago, without telling anybody.

        Its SuperExec, a child of the SuperLink, does not wait for it, so it stays as a zombie
        until that starts another. Without /proc (macOS) `start_timeout` has to do.
        """
        link = self.superlink.process.pid
        if self._app is None:
            found = (pid for pid, parent, _ in _processes(APPS) if _parent(parent) == link)
            self._app = next(found, None)
        if self._died is None and self._app is not None and not is_running(self._app):
            self._died = time.monotonic()
        return self._died is not None and time.monotonic() - self._died > LAST_WORDS_SECONDS

    def _dead_part_of_ray(self, driver: int) -> str | None:
        """Name of a process that Ray cannot do without and that has ended; None: all is well.

        Ray itself finds out after 20 to 60 seconds. Its parts are children of the driver.
        """
        if not self._ray or time.monotonic() - self._looked < RAY_LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        parts = (part for part in _processes(RAY) if part[1] == driver)
        return next((name for pid, _, name in parts if not is_running(pid)), None)


def warning(message: str) -> Event:
    """An event for people, from the engine itself."""
    return {"time": time.time(), "event": "warning", "message": message}


def _why(submission: Child) -> str:
    """Who is killed leaves no word, and what it said before is no reason."""
    log = read_log(submission.log)
    told = re.search("error|exception", log, re.IGNORECASE)
    why = telling_lines(log) if told else "no error in its log, so it was killed (out of memory?)"
    return f"{why}; see {submission.log}"


def _processes(names: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Number, parent and name of processes of these names, those included that are zombies."""
    for entry in PROC.glob("[0-9]*"):
        status = process_status(int(entry.name))
        if status is not None and status.name in names:
            yield int(entry.name), status.parent, status.name


def _parent(pid: int) -> int:
    """The parent's number; 0 if there is no such process."""
    status = process_status(pid)
    return 0 if status is None else status.parent
