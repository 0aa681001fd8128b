"""Who runs on this machine, and which of them belong to a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Names the run in the environment of every process that descends from the launcher.
MARKER = "BLEND_RUN"
PROC = Path("/proc")

# A process id and the time it started, because ids are given again.
Process = tuple[int, int]


def relatives(
    marker: str, roots: set[int], table: Mapping[Process, int] | None = None
) -> set[Process]:
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


def processes() -> dict[Process, int]:
    """Every running process of this machine and its parent's id; zombies have ended."""
    table: dict[Process, int] = {}
    if not PROC.is_dir():
        return _process_list()
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            table[int(entry.name), int(fields[19])] = int(fields[1])
    return table


def is_running(pid: int) -> bool:
    """Whether a process of this id exists and is no zombie."""
    if not PROC.is_dir():
        return any(found == pid for found, _ in _process_list())
    return _stat(pid) is not None


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None if the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program, in brackets before them, may hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 and fields[0] not in "ZX" else None


def _carries(pid: int, marker: str) -> bool:
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARKER}={marker}".encode() in variables


def _process_list() -> dict[Process, int]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    return {(int(r[0]), 0): int(r[1]) for r in rows if len(r) > 2 and not r[2].startswith("Z")}
