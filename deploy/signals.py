"""Ctrl-C and SIGTERM as one exception, which the clean-up is not interrupted by."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


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

    raised: bool = False
    shields: int = 0
    waiting: int | None = None


_state = _State()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal raise `Interrupted` in the main thread; ignore all further ones.

    Call it in the main thread, around everything that starts processes.
    """
    _state.raised, _state.waiting = False, None
    numbers = [signal.SIGINT, signal.SIGTERM]
    # A run under nohup goes on when the terminal is closed.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _handle) for number in numbers}
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
        if _state.waiting is not None and not _state.shields and not _state.raised:
            _raise(_state.waiting)


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.raised:
        return
    if _state.shields:
        _state.waiting = _state.waiting or number
    else:
        _raise(number)


def _raise(number: int) -> None:
    _state.raised = True
    raise Interrupted(number)
