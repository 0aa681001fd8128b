"""Who holds how many images of which class: one square per client and class."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blend_core.state import write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Up to so many rows or columns each one is named.
_NAMED = 60
# So many characters of a name are shown.
_LONGEST = 32
# Inches that a character takes, at the sizes of names and of the title.
_NAME_CHARACTER, _TITLE_CHARACTER = 0.06, 0.08


def write_partition_picture(
    path: Path,
    counts: npt.NDArray[np.int64],
    clients: Sequence[str],
    classes: Sequence[str],
    title: str,
) -> None:
    """Write the picture (`draw_partition`) as PNG.

    Raises:
        StateError: the file cannot be written.
    """
    image = io.BytesIO()
    draw_partition(counts, clients, classes, title).savefig(image, format="png")
    write_bytes_atomic(path, image.getvalue())


def draw_partition(
    counts: npt.NDArray[np.int64], clients: Sequence[str], classes: Sequence[str], title: str
) -> Figure:
    """A heat map of the clients' training images, and bars of how many each has.

    Args:
        counts: training images, shape [clients, classes]; 0 stays white.
        clients: their names, from top to bottom.
        classes: their names, from left to right.
        title: what was dealt and how; wrapped where it is longer than the picture is wide.
    """
    import matplotlib
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows, columns = counts.shape
    across, down = (0.16 if n <= _NAMED else 0.06 for n in (columns, rows))  # inches a square
    beside, below = (_NAME_CHARACTER * _longest(names) for names in (clients, classes))
    width = min(16.0, max(6.0, 3.6 + beside + across * columns))
    lines = textwrap.wrap(title, int(width / _TITLE_CHARACTER), break_on_hyphens=False)
    height = min(16.0, max(2.0, down * rows) + below + 1.2 + 0.15 * len(lines))
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9, x=0.01, ha="left")
    grid = figure.add_gridspec(1, 2, width_ratios=(max(3.0, width - 3.0), 1.6))
    axes, bars = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    most = max(int(counts.max(initial=0)), 2)
    # A few large clients would hide all others on a linear scale.
    logarithmic = most > 100
    image = axes.imshow(
        np.ma.masked_equal(counts, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=matplotlib.colormaps["viridis_r"],
        norm=LogNorm(1, most) if logarithmic else Normalize(1, most),
    )
    scale = figure.colorbar(image, ax=axes, pad=0.01)
    kind = "logarithmic" if logarithmic else "linear"
    scale.set_label(f"images of a class, {kind} scale; white: none", fontsize=7)
    ticks = _ticks(most, logarithmic)
    scale.set_ticks(ticks, labels=[f"{tick:,}" for tick in ticks], fontsize=7)
    scale.minorticks_off()
    _name_ticks(axes.yaxis, clients, "client", 0)
    _name_ticks(axes.xaxis, classes, "class", 90)
    bars.barh(range(rows), counts.sum(1), color="#0072B2")
    bars.set_ylim(rows - 0.5, -0.5)
    bars.set_yticks([])
    bars.set_xlabel("training images", fontsize=8)
    bars.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    bars.tick_params(labelsize=7)
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def _ticks(most: int, logarithmic: bool) -> list[int]:
    """Whole numbers from 1 to about `most`: powers of ten, or at most six evenly spaced."""
    if logarithmic:
        return [10**power for power in range(len(str(most)))]
    step = -(-(most - 1) // 5)
    return list(range(1, most + 1, step))


def _name_ticks(axis: Axis, names: Sequence[str], what: str, rotation: int) -> None:
    """Names on an axis, or only how many there are where they would not fit."""
    if len(names) <= _NAMED:
        shown = [_cut(name).replace("$", r"\$") for name in names]
        axis.set_ticks(range(len(names)), shown, fontsize=7, rotation=rotation)
    else:
        axis.set_label_text(f"{what} (0 to {len(names) - 1})")


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."


def _longest(names: Sequence[str]) -> int:
    """Characters of the longest name that is shown; 0 if none is."""
    return max(len(_cut(name)) for name in names) if len(names) <= _NAMED else 0
