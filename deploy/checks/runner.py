"""Runs the groups of checks, each in a process that can be ended whatever it is doing."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import IO

from deploy.checks import CONFIGURATION, Check, Settings, failure
from deploy.children import telling_lines

# All at the same time; shown in this order.
GROUPS = ("machine", "model", "site", "superlink")
# Seconds. A process need not end: the system keeps one that waits for a dead network mount, even
# when it is killed.
_PATIENCE = 5.0
_NOWHERE = "http://127.0.0.1:9"
# Weights must be here already: nothing is fetched, be it from the hub or by a plain URL.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _NOWHERE),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), ""),
}

# A group and what it says; None: it has ended.
_Line = tuple[str, Check | None]
# How a group failed to come to its end, and what to do; None: it came to its end.
_Ending = tuple[str, str] | None


def examine(
    settings: Settings, timeout: float, on_progress: Callable[[str], None] = lambda text: None
) -> list[Check]:
    """Run all checks at the same time; those that do not end in time say so.

    Args:
        settings: what to look at.
        timeout: seconds for all.
        on_progress: called with what is being done now.
    """
    deadline = time.monotonic() + timeout
    checks: dict[str, list[Check]] = {group: [] for group in GROUPS}
    lines: queue.Queue[_Line] = queue.Queue()
    endings: dict[str, _Ending] = {}
    with ExitStack() as stack:
        files = {group: stack.enter_context(tempfile.TemporaryFile()) for group in GROUPS}
        running = {group: _start(group, settings, files[group], lines) for group in GROUPS}
        try:
            while len(endings) < len(GROUPS):
                try:
                    group, check = lines.get(timeout=max(deadline - time.monotonic(), 0.0))
                except queue.Empty:
                    break
                if check is None:
                    endings[group] = _ending(running[group], files[group])
                    continue
                if not check.done:
                    on_progress(check.found)
                if checks[group] and not checks[group][-1].done:
                    checks[group].pop()
                checks[group].append(check)
        finally:
            stuck = _killed(running)
    late = f"not finished within {timeout:.0f} s"
    for group in (group for group in GROUPS if group not in endings):
        endings[group] = (late, "give --timeout more seconds")
        if group in stuck:
            what = f"{late}, and process {running[group].pid} cannot be killed"
            endings[group] = (what, "does a folder lie on a network mount that does not answer?")
    return [check for group in GROUPS for check in _told(group, checks[group], endings[group])]


def exit_code(checks: list[Check]) -> int:
    """0 without a failure, else the first of 2, 3 and 4: what has to be mended first."""
    return min((check.code for check in checks if check.level == "failure"), default=0)


def _start(
    group: str, settings: Settings, errors: IO[bytes], lines: queue.Queue[_Line]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.checks", group],
        env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # It has ended already, which its ending says.
        process.stdin.write(json.dumps(asdict(settings)).encode())
        process.stdin.close()

    def forward() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put((group, Check(**json.loads(line))))
        lines.put((group, None))

    threading.Thread(target=forward, daemon=True).start()
    return process


def _killed(running: Mapping[str, subprocess.Popen[bytes]]) -> set[str]:
    """End all processes; the groups of those that do not end even so."""
    for process in running.values():
        process.kill()
    deadline, stuck = time.monotonic() + _PATIENCE, set()
    for group, process in running.items():
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            stuck.add(group)
    return stuck


def _ending(process: subprocess.Popen[bytes], errors: IO[bytes]) -> _Ending:
    """Why a group ended before its work was done."""
    try:
        code = process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        what = f"said nothing more, and process {process.pid} did not end within {_PATIENCE:g} s"
        return what, "run blend doctor again"
    if code == 0:
        return None
    errors.seek(0)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    why = telling_lines(errors.read().decode(errors="replace"))
    return f"its process ended ({how}): {why}", "install again: pip install ."


def _told(group: str, checks: list[Check], ending: _Ending) -> list[Check]:
    """What a group said, with an end for what it did not finish."""
    if ending is None:
        return checks
    what, advice = ending
    if not checks or checks[-1].done:
        return [*checks, failure(group, what, advice, CONFIGURATION)]
    begun = checks[-1]
    advice = "; or: ".join(filter(None, (advice, begun.advice)))
    return [*checks[:-1], replace(begun, found=f"{begun.found}: {what}", advice=advice, done=True)]
