"""The run's journal: one JSON line per event, for whoever watches the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

JOURNAL = "events.jsonl"


class Journal:
    """Appends events to `folder/events.jsonl`; every line is whole and flushed at once.

    It is a view for people and launchers, not a record: results and checkpoints are.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / JOURNAL).open("a", encoding="utf-8")

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with the time in unix seconds."""
        self._file.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
