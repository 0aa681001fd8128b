"""The run's journal: one JSON line per event, for whoever watches the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOURNAL = "events.jsonl"


class Journal:
    """Appends events to `folder/events.jsonl`; every line is whole and flushed at once.

    It is a view for people and launchers, not a record: results and checkpoints are. `echo`, if
    given, gets a line for every event but the single replies.
    """

    def __init__(self, folder: Path, echo: Callable[[str], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.echo = echo
        self._file = (folder / JOURNAL).open("a", encoding="utf-8")
        if _cut(folder / JOURNAL):  # A run that was killed while it wrote, and is resumed.
            self._file.write("\n")

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with the time in unix seconds."""
        self._file.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")
        self._file.flush()
        if self.echo is not None and event != "heard":
            told = {k: v for k, v in facts.items() if v is not None and not isinstance(v, dict)}
            numbers = {k: f"{v:.1f}" for k, v in told.items() if isinstance(v, float)}
            shown = (f"{key} {numbers.get(key, value)}" for key, value in told.items())
            self.echo(f"{event}: {', '.join(shown)}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut(path: Path) -> bool:
    """Whether the last line has no end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read() not in (b"", b"\n")
