"""Who runs on this machine, and which of them belong to a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from client.process import PROC, process_status

# Names the run in the environment of every process that descends from the launcher.
MARKER = "BLEND_RUN"

# A process's number and the time it started, because numbers are given again.
ProcessId = tuple[int, int]


def relatives(
    marker: str, roots: set[int], table: Mapping[ProcessId, int] | None = None
) -> set[ProcessId]:
    """Running processes that carry the marker or descend from `roots`, roots included.

    Without /proc (macOS) these are the roots alone; Flower's own processes end with their parents.
    """
    if table is None:
        table = processes()
    family = {p for p in table if p[0] in roots or _carries(p[0], marker)}
    grown = True
    while grown:
        pids = {pid for pid, _ in family}
        more = {p for p, parent in table.items() if parent in pids and p not in family}
        family |= more
        grown = bool(more)
    return {p for p in family if p[0] != os.getpid()}


def processes() -> dict[ProcessId, int]:
    """Every running process of this machine and its parent's id; zombies have ended."""
    table: dict[ProcessId, int] = {}
    if not PROC.is_dir():
        return _process_list()
    for entry in PROC.iterdir():
        status = process_status(int(entry.name)) if entry.name.isdigit() else None
        if status is not None and not status.ended:
            table[int(entry.name), status.start] = status.parent
    return table


def is_running(pid: int) -> bool:
    """Whether a process of this id exists and is no zombie."""
    if not PROC.is_dir():
        return any(found == pid for found, _ in _process_list())
    status = process_status(pid)
    return status is not None and not status.ended


def _carries(pid: int, marker: str) -> bool:
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARKER}={marker}".encode() in variables


def _process_list() -> dict[ProcessId, int]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    return {(int(r[0]), 0): int(r[1]) for r in rows if len(r) > 2 and not r[2].startswith("Z")}
