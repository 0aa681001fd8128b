"""Who holds how many images of which class: one square per client and class."""

from __future__ import annotations

import io
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
        title: one line.
    """
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows, columns = counts.shape
    across, down = (0.16 if n <= _NAMED else 0.06 for n in (columns, rows))  # inches a square
    width = min(16.0, max(6.0, 3.5 + across * columns))
    height = min(16.0, max(3.2, 1.8 + down * rows + (0.8 if columns <= _NAMED else 0)))
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=(max(3.0, width - 3.0), 1.6))
    axes, bars = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    most = max(int(counts.max(initial=0)), 1)
    # A few large clients would hide all others on a linear scale.
    norm = LogNorm(1, most) if most > 100 else None
    shown = np.ma.masked_equal(counts, 0)
    image = axes.imshow(
        shown,
        aspect="auto",
        interpolation="nearest",
        cmap=matplotlib.colormaps["viridis_r"],
        norm=norm,
        vmin=None if norm else 0,
        vmax=None if norm else most,
    )
    scale = figure.colorbar(image, ax=axes, pad=0.01)
    scale.set_label("training images", fontsize=8)
    scale.ax.tick_params(labelsize=7)
    axes.set_title(title, fontsize=9, loc="left")
    _name_ticks(axes.yaxis, clients, "client", 0)
    _name_ticks(axes.xaxis, classes, "class", 90)
    bars.barh(range(rows), counts.sum(1), color="#0072B2")
    bars.set_ylim(rows - 0.5, -0.5)
    bars.set_yticks([])
    bars.set_title("images", fontsize=9)
    bars.tick_params(labelsize=7)
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def _name_ticks(axis: Axis, names: Sequence[str], what: str, rotation: int) -> None:
    """Names on an axis, or only how many there are where they would not fit."""
    if len(names) <= _NAMED:
        shown = [name.replace("$", r"\$") for name in names]
        axis.set_ticks(range(len(names)), shown, fontsize=7, rotation=rotation)
    else:
        axis.set_label_text(f"{what} (0 to {len(names) - 1})")
