"""Shows how a run goes: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deploy.events import Event

# Returns lines, and for each whether a terminal with its live line keeps it, too.
Handler = Callable[[Event], list[tuple[str, bool]]]


class Progress:
    """Turns a run's events into lines for people. Use it in a `with` and call it per event.

    Args:
        console: where to write; whether it is a terminal decides about the live line.
        rounds: rounds of the run, from 1.
        clients: clients that must join.
        started: unix time at which the user started the run, seconds.
    """

    def __init__(self, console: Console, rounds: int, clients: int, started: float) -> None:
        self.console = console
        self.rounds = rounds
        self.clients = clients
        self.started = started
        self.phase = "starting"
        self.metrics: dict[str, float] = {}
        self.durations: list[float] = []
        self.done = 0
        self._round_start: float | None = None
        self._live = Live(self, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take one event of the journal or of an engine; unknown kinds are passed over."""
        handler: Handler = getattr(self, f"_on_{event['event']}", lambda event: [])
        for line, lasting in handler(event):
            # The live line shows by itself what is true at the moment.
            if lasting or not self.console.is_terminal:
                self.console.print(Text(line), soft_wrap=True)

    def __rich__(self) -> Text:
        """The live line, of at most 80 columns: the time left, once known, else the time passed."""
        passed = f"{duration(time.time() - self.started)} so far"
        parts = [self.phase, *self._metrics(), self._left() or passed]
        return Text("  ".join(part for part in parts if part), overflow="ellipsis", no_wrap=True)

    def _on_started(self, event: Event) -> list[tuple[str, bool]]:
        self.phase = "server started, waiting for clients"
        return [(f"server started ({event.get('engine')}, process {event.get('pid')})", False)]

    def _on_resumed(self, event: Event) -> list[tuple[str, bool]]:
        self.done = int(event["round"])
        return [(f"resumed after round {self.done} of {event['of']}", True)]

    def _on_stopped(self, event: Event) -> list[tuple[str, bool]]:
        return [(f"training stopped after round {event['round']}: {event['reason']}", True)]

    def _on_state_lost(self, event: Event) -> list[tuple[str, bool]]:
        return [(f"{self._when(event)}: {event['client']} {event['reason']}", True)]

    def _on_forming(self, event: Event) -> list[tuple[str, bool]]:
        have = event["have"]
        self.phase = f"clients joined {len(have)}/{event['want']}"
        names = f" ({', '.join(map(str, have))})" if have else ""
        return [(f"clients joined: {len(have)} of {event['want']}{names}", False)]

    def _on_formed(self, event: Event) -> list[tuple[str, bool]]:
        self.phase = "all clients joined"
        zero = event.get("zero_shot") or {}
        shown = "  ".join(_named(zero))
        joined = f"{len(event['clients'])} clients joined"
        return [(f"{joined}; zero-shot {shown}" if shown else joined, True)]

    def _on_round(self, event: Event) -> list[tuple[str, bool]]:
        self._round_start = time.time()
        self.phase = f"round {event['round']}/{event['of']}  heard 0/{event['asked']}"
        return []

    def _on_heard(self, event: Event) -> list[tuple[str, bool]]:
        heard = f"heard {event['heard']}/{event['asked']}"
        self.phase = f"round {event['round']}/{self.rounds}  {heard}"
        return []

    def _on_refused(self, event: Event) -> list[tuple[str, bool]]:
        return [(f"{self._when(event)}: {event['client']} refused: {event['reason']}", True)]

    def _on_absent(self, event: Event) -> list[tuple[str, bool]]:
        return [(f"{self._when(event)}: {event['client']} absent: {event['reason']}", True)]

    def _on_warning(self, event: Event) -> list[tuple[str, bool]]:
        return [(f"warning: {event['message']}", True)]

    def _on_round_done(self, event: Event) -> list[tuple[str, bool]]:
        self.durations.append(float(event["seconds"]))
        self._round_start = None
        now = {key: event[key] for key in ("per", "gen") if event.get(key) is not None}
        self.metrics.update(now)
        parts = [
            f"round {event['round']}/{self.rounds}",
            f"clients {event['accepted']}/{event['asked']}",
            *_named(now),
            duration(float(event["seconds"])),
        ]
        self.done = int(event["round"])
        left = self._left() if self.done < self.rounds else ""
        return [("  ".join(part for part in [*parts, left] if part), False)]

    def _on_final(self, event: Event) -> list[tuple[str, bool]]:
        self.phase = f"last evaluation of {event['asked']} clients"
        self.durations.clear()
        return [(self.phase, False)]

    def _when(self, event: Event) -> str:
        number = int(event.get("round", 0))
        if number == 0:
            return "joining"
        return f"round {number}" if number <= self.rounds else "last evaluation"

    def _metrics(self) -> list[str]:
        return _named(self.metrics)

    def _left(self) -> str:
        """How long the rest will take, at the pace of the rounds so far."""
        if not self.durations:
            return ""
        pace = sum(self.durations) / len(self.durations)
        running = time.time() - self._round_start if self._round_start is not None else 0.0
        rest = pace * (self.rounds - self.done) - running
        return f"about {duration(max(rest, 0.0))} left"


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 58 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _named(metrics: dict[str, Any]) -> list[str]:
    titles = {"per": "Per.", "gen": "Gen.", "hmean": "H-Mean"}
    known = {title: metrics.get(key) for key, title in titles.items()}
    return [f"{title} {value:.1f}" for title, value in known.items() if value is not None]
