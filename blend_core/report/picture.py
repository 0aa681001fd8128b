"""Per. against Gen.: where every row stands between personal and general."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend_core.errors import printable
from blend_core.report.comparison import Comparison
from blend_core.report.rows import ZERO_SHOT, Row
from blend_core.state import write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart, without yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
# Zero-shot of each setup: an open marker of its own.
_OPEN_COLOURS = ("#404040", *_COLOURS)
_OPEN_MARKERS = "*pd<>"
_GREY = "#8a8a8a"
_LEGEND_WIDTH = 28  # characters
# Share of the axes that a curve's label keeps from their border.
_BORDER = 0.06


def write_picture(comparison: Comparison, out: Path) -> list[Path]:
    """Write compare.png and compare.svg (`draw`) into an existing folder and return their paths.

    Raises:
        StateError: a file cannot be written.
    """
    import matplotlib

    figure = draw(comparison)
    paths = []
    # Without a fixed salt and date the same comparison would give other bytes each time.
    with matplotlib.rc_context({"svg.hashsalt": "blend"}):
        for ending in ("png", "svg"):
            image = io.BytesIO()
            metadata = {"Date": None} if ending == "svg" else None
            figure.savefig(image, format=ending, metadata=metadata)
            paths.append(out / f"compare.{ending}")
            write_bytes_atomic(paths[-1], image.getvalue())
    return paths


def draw(comparison: Comparison) -> Figure:
    """One point per row in percent, with sample standard deviations over seeds as bars.

    Grey curves join points of equal H-Mean. Rows without Per. or Gen. are left out.
    """
    from matplotlib.figure import Figure

    labels = [_plain(textwrap.fill(line.row.label, _LEGEND_WIDTH)) for line in comparison.lines]
    legend_height = 0.17 * sum(label.count("\n") + 2 for label in labels)  # inches
    figure = Figure(figsize=(8, max(4.8, legend_height)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    points: list[tuple[float, float]] = []
    shown: list[Row] = []
    for label, line in zip(labels, comparison.lines, strict=True):
        row = line.row
        per, gen = row.mean("per"), row.mean("gen")
        if per is None or gen is None:
            continue
        alike = sum((other.method == ZERO_SHOT) == (row.method == ZERO_SHOT) for other in shown)
        across, up = row.std("per"), row.std("gen")
        look = _look(row, alike)
        bars = axes.errorbar(
            per, gen, xerr=across, yerr=up, label=label, capsize=3, elinewidth=1, **look
        )
        # A marker at 100 is whole, though the axes end there.
        bars.lines[0].set_clip_on(False)
        shown.append(row)
        points += [(per, gen), (per - (across or 0), gen), (per + (across or 0), gen)]
        points += [(per, gen - (up or 0)), (per, gen + (up or 0))]
    axes.margins(0.15)
    axes.set_xlim(*_percentages(*axes.get_xlim()))
    axes.set_ylim(*_percentages(*axes.get_ylim()))
    _draw_curves(axes, points)
    axes.set_xlabel("Per. (%)")
    axes.set_ylabel("Gen. (%)")
    axes.set_title(_plain(printable(comparison.note)), fontsize=9)
    if shown:  # matplotlib warns about a legend of nothing.
        figure.legend(
            loc="outside right upper",
            fontsize=8,
            frameon=False,
            title="\n".join(["grey curves: equal H-Mean", *_bars(shown)]),
            title_fontsize=8,
        )
    return figure


def _plain(text: str) -> str:
    """A text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def _look(row: Row, number: int) -> dict[str, Any]:
    """Marker and colour, all different, of the row with this number among those of its kind."""
    if row.method == ZERO_SHOT:
        colour = _OPEN_COLOURS[number // len(_OPEN_MARKERS) % len(_OPEN_COLOURS)]
        marker = _OPEN_MARKERS[number % len(_OPEN_MARKERS)]
        size = 14 if marker == "*" else 10
        return {"fmt": marker, "markersize": size, "color": colour, "markerfacecolor": "white"}
    marker = _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
    return {"fmt": marker, "markersize": 8, "color": _COLOURS[number % len(_COLOURS)]}


def _bars(rows: Sequence[Row]) -> list[str]:
    """What the bars are, in words; nothing where there are none."""
    seeds = sorted({row.n for row in rows if row.n > 1})
    if not seeds:
        return []
    counts = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return [f"bars: std over {counts} seeds"]


def _percentages(low: float, high: float) -> tuple[float, float]:
    """The part of an axis where percentages can be."""
    return max(low, 0.0), min(high, 100.0)


def _draw_curves(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Curves of equal H-Mean, each with its label where it is farthest from all points."""
    import numpy as np

    low, high = np.array([axes.get_xlim(), axes.get_ylim()]).T
    x, y = np.meshgrid(*np.linspace(low, high, 200).T)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = 2 * x * y / (x + y)
    curves = axes.contour(x, y, level, levels=8, colors=_GREY, linewidths=0.6, zorder=0)
    taken = (np.reshape(points, (-1, 2)) - low) / (high - low)
    places = []
    for segments in curves.allsegs:
        curve = np.concatenate([np.empty((0, 2)), *segments])
        shares = (curve - low) / (high - low)
        inside = np.all((shares > _BORDER) & (shares < 1 - _BORDER), axis=1)
        if inside.any() and len(taken):
            away = np.linalg.norm(shares[inside, None] - taken, axis=2).min(axis=1)
            places.append(tuple(curve[inside][away.argmax()]))
    axes.clabel(curves, fmt="%g", fontsize=8, manual=places)
