"""The run's journal: one JSON line per event, for whoever watches the run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOURNAL = "events.jsonl"


class Journal:
    """Appends events to `folder/events.jsonl`; every line is whole and flushed at once.

    It is a view for people and launchers, not a record: results and checkpoints are. So a line
    that cannot be written is no reason to fail. `echo`, if given, gets a line for every event but
    the single replies.

    Raises:
        StateError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, echo: Callable[[str], None] | None = None) -> None:
        # Here, because whoever only wants the file's name must not load numpy with it.
        from blend_core.state import StateError, make_folder

        make_folder(folder)
        self.echo = echo
        try:
            # Unbuffered: what could not be written is not tried again in the middle of the next.
            self._file = (folder / JOURNAL).open("ab", buffering=0)
        except OSError as error:
            raise StateError(f"{folder / JOURNAL}: cannot be written: {error.strerror}") from None
        if _cut(folder / JOURNAL):  # A run that was killed while it wrote, and is resumed.
            self._append(b"\n")

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with the time in unix seconds."""
        line = json.dumps({"time": time.time(), "event": event, **facts}) + "\n"
        self._append(line.encode())
        if self.echo is not None and event != "heard":
            told = {k: v for k, v in facts.items() if v is not None and not isinstance(v, dict)}
            numbers = {k: f"{v:.1f}" for k, v in told.items() if isinstance(v, float)}
            shown = (f"{key} {numbers.get(key, value)}" for key, value in told.items())
            self.echo(f"{event}: {', '.join(shown)}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        # A full disk must not hide from the user what else it stops: checkpoints say it better.
        try:
            self._file.write(line)
        except OSError as error:
            print(f"blend: {JOURNAL}: {error.strerror}", file=sys.stderr, flush=True)


def _cut(path: Path) -> bool:
    """Whether the last line has no end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read() not in (b"", b"\n")
