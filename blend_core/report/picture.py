"""Per. against Gen.: where every row stands between personal and general."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

from blend_core.report.comparison import Comparison
from blend_core.report.rows import ZERO_SHOT
from blend_core.state import write_bytes_atomic

# Okabe and Ito's colours, which people with any colour vision can tell apart, without yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#8a8a8a"
_LEGEND_WIDTH = 28  # characters


def write_picture(comparison: Comparison, out: Path) -> list[Path]:
    """Write compare.png and compare.svg into an existing folder and return their paths.

    One point per row, error bars are sample standard deviations over seeds, grey curves join
    points of equal H-Mean. Rows without Per. or Gen. are left out.

    Raises:
        ImportError: matplotlib is not installed.
        StateError: a file cannot be written.
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    labels = [textwrap.fill(line.row.label, _LEGEND_WIDTH) for line in comparison.lines]
    legend_height = 0.17 * sum(label.count("\n") + 2 for label in labels)  # inches
    figure = Figure(figsize=(8, max(4.8, legend_height)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    shown = 0
    for label, line in zip(labels, comparison.lines, strict=True):
        row = line.row
        per, gen = row.mean("per"), row.mean("gen")
        if per is None or gen is None:
            continue
        plain = row.method == ZERO_SHOT
        axes.errorbar(
            per,
            gen,
            xerr=row.std("per"),
            yerr=row.std("gen"),
            label=label,
            fmt="*" if plain else _MARKERS[shown // len(_COLOURS) % len(_MARKERS)],
            markersize=14 if plain else 8,
            color="#404040" if plain else _COLOURS[shown % len(_COLOURS)],
            markerfacecolor="white" if plain else None,
            capsize=3,
            elinewidth=1,
        )
        shown += not plain
    axes.margins(0.15)
    across, up = axes.get_xlim(), axes.get_ylim()
    x, y = np.meshgrid(np.linspace(*across, 200), np.linspace(*up, 200))
    with np.errstate(divide="ignore", invalid="ignore"):
        level = 2 * x * y / (x + y)
    curves = axes.contour(x, y, level, levels=8, colors=_GREY, linewidths=0.6, zorder=0)
    axes.clabel(curves, fmt="%g", fontsize=8)
    axes.set_xlabel("Per. (%)")
    axes.set_ylabel("Gen. (%)")
    axes.set_title(comparison.note, fontsize=9)
    figure.legend(
        loc="outside right upper",
        fontsize=8,
        frameon=False,
        title="grey curves: equal H-Mean",
        title_fontsize=8,
    )
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
