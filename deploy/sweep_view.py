"""Shows how a sweep goes: a live table in a terminal, a line per ended run elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blend_core.metrics import DASH, HARMONIC, METRIC_NAMES, harmonic_mean
from deploy.events import Event
from deploy.grid import Cell
from deploy.progress import duration
from deploy.table import WIDTH

SHOWN = ("per", "gen", "hmean")
# Lines of a terminal that are not rows of the table.
FRAME_LINES = 4
STYLES = {"running": "bold", "failed": "red", "waiting": "dim"}


@dataclass
class Row:
    """What is known of one run.

    Attributes:
        state: "waiting", "running", or the status of a `CellResult`.
        round: e.g. "3/20".
        metrics: percent; while it runs those of the model that entered the last round.
        since: when it was started, then when it ended, in seconds of the monotonic clock.
        seconds: how long it ran; None before its end.
    """

    label: str
    state: str = "waiting"
    round: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    since: float = 0.0
    seconds: float | None = None


class SweepView:
    """Use it in a `with` and tell it what happens.

    Args:
        console: where to write; whether it is a terminal decides about the table.
        names: label of every cell, in the order of the table.
    """

    def __init__(self, console: Console, names: Mapping[Cell, str]) -> None:
        self.console = console
        self.rows = {cell: Row(name) for cell, name in names.items()}
        self._ended = False
        self._live = Live(self, console=console, refresh_per_second=4)

    def __enter__(self) -> SweepView:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = True  # The table that stays has all rows.
        self._live.stop()

    def started(self, cell: Cell) -> None:
        """The run of a cell begins."""
        row = self.rows[cell]
        row.state, row.since = "running", time.monotonic()

    def event(self, cell: Cell, event: Event) -> None:
        """The run's journal has another event."""
        row = self.rows[cell]
        if event["event"] == "round":
            row.round = f"{event['round']}/{event['of']}"
        elif event["event"] == "round_done" and event["per"] is not None:
            means = {key: event[key] for key in HARMONIC["hmean"]}
            row.metrics = {**means, "hmean": harmonic_mean(list(means.values()))}

    def ended(
        self, cell: Cell, status: str, reason: str, results: Mapping[str, Any] | None
    ) -> None:
        """The run of a cell is over, or was so before the sweep."""
        row = self.rows[cell]
        row.seconds = time.monotonic() - row.since if row.state == "running" else None
        row.state, row.since = status, time.monotonic()
        if results is not None:
            row.metrics, row.seconds = results["final"], results["seconds"]["total"]
        if not self.console.is_terminal:
            count = sum(row.state not in ("waiting", "running") for row in self.rows.values())
            numbers = [f"{METRIC_NAMES[key]} {_percent(row, key)}" for key in SHOWN]
            told = [reason] if reason else [*numbers, _seconds(row)]
            line = f"[{count}/{len(self.rows)}] {row.label}, seed {cell.seed}: {status}  "
            self.console.print(Text(line + "  ".join(told)), soft_wrap=True)

    def __rich__(self) -> Table:
        """The table, of at most 80 columns and, while the sweep runs, of the terminal's height."""
        counts = Counter(row.state for row in self.rows.values())
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
            width=min(self.console.width, WIDTH),
            caption=", ".join(f"{count} {state}" for state, count in counts.items()),
            caption_justify="left",
        )
        # One line per run while it runs, or the table would be higher than the terminal.
        overflow: Literal["fold", "ellipsis"] = "fold" if self._ended else "ellipsis"
        table.add_column("cell", ratio=1, no_wrap=not self._ended, overflow=overflow)
        table.add_column("seed", no_wrap=True, justify="right")
        table.add_column("state", no_wrap=True)
        for heading in ("round", *(METRIC_NAMES[key] for key in SHOWN), "time"):
            table.add_column(heading, no_wrap=True, justify="right")
        shown = set(self.rows) if self._ended else self._newest(self.console.height - FRAME_LINES)
        for cell, row in self.rows.items():
            if cell in shown:
                numbers = [_percent(row, key) for key in SHOWN]
                cells = (row.label, str(cell.seed), row.state, row.round, *numbers, _seconds(row))
                table.add_row(*map(Text, cells), style=STYLES.get(row.state))
        return table

    def _newest(self, count: int) -> set[Cell]:
        """The runs that fit: those that run, those that ended last, those that come next."""
        order = {"running": 0, "waiting": 2}

        def rank(cell: Cell) -> tuple[int, float]:
            row = self.rows[cell]
            return order.get(row.state, 1), -row.since

        return set(sorted(self.rows, key=rank)[: max(count, 1)])


def _percent(row: Row, key: str) -> str:
    value = row.metrics.get(key)
    return DASH if value is None else f"{value:.1f}"


def _seconds(row: Row) -> str:
    if row.state == "running":
        return duration(time.monotonic() - row.since)
    return "" if row.seconds is None else duration(row.seconds)
