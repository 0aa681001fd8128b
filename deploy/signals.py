"""Ctrl-C and SIGTERM as one exception, which the clean-up is not interrupted by."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# Seconds in which a clean-up that a signal started is not disturbed by another one.
PATIENCE = 3.0


class Interrupted(BaseException):
    """The user or the system asked us to end.

    Attributes:
        exit_code: 128 plus the signal's number, as shells expect: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass
class _State:
    """What the handler, which has no caller to ask, has to know."""

    # When the last signal was raised, in seconds of the monotonic clock; None before.
    raised: float | None = None
    shields: int = 0
    waiting: int | None = None


_state = _State()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise `Interrupted` in the main thread; ignore others for `PATIENCE` seconds.

    Call it in the main thread, around everything that starts processes.
    """
    _state.raised, _state.waiting = None, None
    numbers = [signal.SIGINT, signal.SIGTERM]
    # A run under nohup goes on when the terminal is closed.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _handle) for number in numbers}
    # Children inherit it where a parent of ours ignores the ends of its own, and then nobody, we
    # neither, learns how a process ended.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a signal that comes within the block wait for its end. The block must have deadlines."""
    _state.shields += 1
    try:
        yield
    finally:
        _state.shields -= 1
        if _state.waiting is not None and not _state.shields:
            _handle(_state.waiting, None)


def _handle(number: int, frame: FrameType | None) -> None:
    # The first one may have been swallowed, by an importer for example.
    if _state.raised is not None and time.monotonic() - _state.raised < PATIENCE:
        return
    if _state.shields:
        _state.waiting = _state.waiting or number
        return
    _state.raised, _state.waiting = time.monotonic(), None
    raise Interrupted(number)
