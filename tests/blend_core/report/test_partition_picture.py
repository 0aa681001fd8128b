"""The picture of `blend data partition`: nothing runs off it, and its colours are explained."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.figure import Figure

from blend_core.report.partition_picture import draw_partition, write_partition_picture

LONG = (
    "office_home, all classes, all images; uniform-classes, classes_per_client 12345; few-shot "
    "seed 123456789, partition seed 987654321"
)


def picture(rows: int, columns: int, most: int, name: str = "cat", title: str = LONG) -> Figure:
    """Of an even deal in which the last client has `most` images of the last class."""
    counts = np.ones((rows, columns), dtype=np.int64)
    counts[0, 0], counts[-1, -1] = 0, most
    clients = [f"client-{number:02d}" for number in range(rows)]
    figure = draw_partition(counts, clients, [f"{name} {n}" for n in range(columns)], title)
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize(
    ("rows", "columns", "name"),
    [(1, 2, "cat"), (4, 20, "cat"), (10, 12, "name " * 20), (60, 60, "cat"), (100, 10, "cat")],
)
def test_the_whole_title_and_every_name_lie_on_the_picture_and_on_nothing_else(rows, columns, name):
    figure = picture(rows, columns, 16, name)
    title = figure.get_suptitle()
    assert title.replace("\n", " ") == LONG
    (heading,) = figure.texts
    boxes = [heading.get_window_extent(), *(axes.get_tightbbox() for axes in figure.axes)]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    # However many words a name has, most of the picture is left to the squares.
    assert figure.axes[0].get_window_extent().height > 0.3 * figure.bbox.height


def test_no_word_of_the_title_is_broken_however_wide_the_picture_is():
    for columns in range(10, 40, 2):
        counts = np.ones((2, columns), dtype=np.int64)
        figure = draw_partition(counts, ["a", "b"], ["cat"] * columns, LONG)
        assert figure.get_suptitle().split() == LONG.split()


@pytest.mark.parametrize(
    ("most", "ticks", "scale"),
    [
        (1, ["1", "2"], "linear"),
        (3, ["1", "2", "3"], "linear"),
        (16, ["1", "4", "7", "10", "13", "16"], "linear"),
        (1943, ["1", "10", "100", "1,000"], "logarithmic"),
    ],
)
def test_colours_count_from_one_image_on_a_scale_that_is_named_and_white_is_none(
    most, ticks, scale
):
    squares, bars, colours = picture(3, 4, most).axes
    assert colours.get_ylabel() == f"images of a class, {scale} scale; white: none"
    assert [label.get_text() for label in colours.get_yticklabels()] == ticks
    assert [label.get_text() for label in colours.get_yticklabels(minor=True)] == []
    (image,) = squares.images
    assert image.norm.vmin == 1
    assert np.ma.getmaskarray(image.get_array()).sum() == 1
    assert bars.get_xlabel() == "training images"


@pytest.mark.filterwarnings("error")
def test_a_picture_is_written_even_of_names_that_look_like_formulas(tmp_path):
    path = tmp_path / "partition.png"
    write_partition_picture(path, np.array([[1, 2]]), ["a"], ["$x$", r"\frac{"], "shapes")
    assert path.read_bytes().startswith(b"\x89PNG")
