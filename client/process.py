"""Processes of this machine, as /proc shows them. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Status(NamedTuple):
    """What the kernel says of a process.

    Attributes:
        name: of its program, at most 15 characters.
        state: one letter.
        parent: the parent's number.
        start: clock ticks from the machine's boot to the start of the process.
    """

    name: str
    state: str
    parent: int
    start: int

    @property
    def ended(self) -> bool:
        """Whether it is a zombie, or about to go."""
        return self.state in "ZX"


def process_status(pid: int) -> Status | None:
    """Status of the process of this number, zombies included; None if there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself.
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Status(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


@dataclass(frozen=True)
class Process:
    """A process that is not confused with a later one of the same number.

    `start` tells when it started (boot and clock ticks since); "" where /proc is missing.
    """

    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number now."""
        found = process_status(pid)
        return cls(pid, _start(found) if found else "")

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        if not self.start:
            try:
                os.kill(self.pid, 0)
            except PermissionError:
                return True
            except OSError:
                return False
            return True
        found = process_status(self.pid)
        return found is not None and _start(found) == self.start and not found.ended


def _start(status: Status) -> str:
    boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")
    return f"{boot[:8]}-{status.start}"
