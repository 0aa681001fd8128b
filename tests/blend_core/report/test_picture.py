"""The picture of `blend compare`: what can be told apart, and what a reader can trust."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from blend_core.report.comparison import Comparison, Line
from blend_core.report.picture import draw, write_picture
from blend_core.report.rows import Row
from blend_core.report.runs import Run


def row(label: str, *seeds: tuple[float, float]) -> Row:
    """A row whose seeds 0, 1, ... have these Per. and Gen."""
    finals = [{"per": per, "gen": gen} for per, gen in seeds]
    runs = {seed: Run(Path(), {"final": final}) for seed, final in enumerate(finals)}
    return Row(label, {"method.name": label.split()[0]}, runs)


def picture(*rows: Row):
    lines = tuple(Line(row, None, None, None) for row in rows)
    return draw(Comparison("hmean", lines, "", "", (), ()))


THREE = (
    row("zero-shot", (60.0, 70.0), (64.0, 74.0), (62.0, 66.0)),
    row("blend", (100.0, 80.0), (98.0, 85.0), (99.0, 90.0)),
    row("promptfl", (100.0, 100.0), (100.0, 100.0), (100.0, 100.0)),
)


def test_axes_end_at_100_and_a_marker_there_is_whole():
    (axes,) = picture(*THREE).axes
    assert (axes.get_xlim()[1], axes.get_ylim()[1]) == (100.0, 100.0)
    assert not any(bars.lines[0].get_clip_on() for bars in axes.containers)
    (axes,) = picture(row("bad", (0.0, 0.0), (4.0, 4.0))).axes
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0.0, 0.0)


def test_bars_are_as_long_as_the_spread_of_their_own_metric():
    (axes,) = picture(row("blend", (50.0, 60.0), (52.0, 60.0), (54.0, 90.0))).axes
    across, up = (bar.get_segments()[0] for bar in axes.containers[0].lines[2])
    # Per. 50, 52, 54: 52 with deviation 2. Gen. 60, 60, 90: 70, and sqrt((2 x 100 + 400) / 2).
    assert across == pytest.approx(np.array([[50, 70], [54, 70]]))
    assert up == pytest.approx(np.array([[52, 70 - 300**0.5], [52, 70 + 300**0.5]]))


def test_no_two_rows_look_alike_and_zero_shot_is_open():
    names = [f"{method} clients={n}" for method in ("zero-shot", "blend") for n in range(9)]
    (axes,) = picture(*(row(name, (n, 50.0)) for n, name in enumerate(names))).axes
    drawn = [bars.lines[0] for bars in axes.containers]
    looks = [(line.get_marker(), line.get_color()) for line in drawn]
    assert len(set(looks)) == 18
    assert [line.get_markerfacecolor() == "white" for line in drawn] == [True] * 9 + [False] * 9


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (THREE, ["bars: std over 3 seeds"]),
        ((THREE[0], row("blend", (90.0, 80.0), (80.0, 80.0))), ["bars: std over 2 to 3 seeds"]),
        ((row("blend", (90.0, 80.0)),), []),
    ],
)
def test_it_is_said_what_the_bars_are_and_over_how_many_seeds(rows, said):
    (legend,) = picture(*rows).legends
    assert legend.get_title().get_text().splitlines()[1:] == said


def test_labels_of_curves_are_not_under_points():
    spread = [row(f"m{n}", pair) for n, pair in enumerate(product((50.0, 70.0, 90.0), repeat=2))]
    figure = picture(*spread)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert len(axes.texts) >= 4
    for text, (_, points) in product(axes.texts, enumerate(spread)):
        place = axes.transData.transform((points.mean("per"), points.mean("gen")))
        assert not text.get_window_extent().padded(10).contains(*place)


@pytest.mark.filterwarnings("error")
def test_both_files_are_written_without_a_row_to_show(tmp_path):
    lines = (Line(Row("blend", {"method.name": "blend"}, {}), None, None, None),)
    paths = write_picture(Comparison("hmean", lines, "", "", (), ()), tmp_path)
    assert [path.name for path in paths] == ["compare.png", "compare.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
