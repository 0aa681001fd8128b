"""Reads the journal that the ServerApp writes while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.journal import JOURNAL

# One event: "time" (unix seconds), "event" (its kind) and what belongs to the kind. Engines add
# {"event": "warning", "message": ...}, which is not in the journal.
Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class EventTail:
    """The events of `out/events.jsonl`, each returned once.

    Args:
        out: the run's folder.
        resume: pass over those that are there already: of the run before it is resumed.
    """

    def __init__(self, out: Path, resume: bool = False) -> None:
        self.path = out / JOURNAL
        self._offset = self.path.stat().st_size if resume and self.path.exists() else 0

    def read(self) -> list[Event]:
        """Return the events that were written since the last call; a half-written line waits."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.splitlines() if (event := _event(line))]


def _event(line: bytes) -> Event | None:
    # The journal is a view for people: a line that cannot be read must not end a run.
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
