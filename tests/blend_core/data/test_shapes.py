"""Tests of the benchmark's renderer: classes, splits, styles and images."""

from collections import Counter
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from blend_core.data.drawing import render, render_each
from blend_core.data.shapes import (
    ALL_COMBINATIONS,
    CLEAN,
    COLOURS,
    FILLS,
    IMAGE_SIZE,
    OUTLINES,
    SHIFTED,
    Combination,
    Style,
    benchmark_classes,
    held_out,
    style_around,
)

STEADY = Style(jitter=0.0)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts(combinations: tuple[Combination, ...], attribute: str) -> list[int]:
    return sorted(Counter(getattr(c, attribute) for c in combinations).values())


def test_there_are_600_combinations_with_unique_names() -> None:
    names = [combination.name for combination in ALL_COMBINATIONS]
    assert len(set(names)) == len(names) == 600
    assert Combination("red", "striped", "star").name == "red striped star" in names


def test_held_out_combinations_are_fixed_and_balanced() -> None:
    chosen = held_out()
    assert chosen == held_out()
    assert len(set(chosen)) == 60
    assert set(chosen) < set(ALL_COMBINATIONS)
    assert counts(chosen, "outline") == [5] * 12
    assert counts(chosen, "colour") == [6] * 10
    assert counts(chosen, "fill") == [12] * 5
    # Every pair of attribute values still occurs among those that are not held out.
    rest = set(ALL_COMBINATIONS) - set(chosen)
    assert {(c.outline, c.fill) for c in rest} == {(o, f) for o in OUTLINES for f in FILLS}
    assert {(c.outline, c.colour) for c in rest} == {(o, k) for o in OUTLINES for k in COLOURS}
    assert {(c.colour, c.fill) for c in rest} == {(k, f) for k in COLOURS for f in FILLS}


def test_the_benchmark_splits_the_held_out_combinations() -> None:
    split = benchmark_classes()
    sets = (split.base, split.new, split.development)
    assert split == benchmark_classes()
    assert [len(s) for s in sets] == [20, 20, 20]
    assert {c for s in sets for c in s} == set(held_out())
    for one in sets:
        assert counts(one, "fill") == [4] * 5
        assert len(counts(one, "outline")) == 12
        assert len(counts(one, "colour")) == 10
        assert counts(one, "outline")[-1] <= 2
        assert counts(one, "colour")[-1] <= 3


def test_images_have_the_promised_form() -> None:
    images = render(ALL_COMBINATIONS[::7], CLEAN, generator())
    assert images.shape == (86, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    assert len(np.unique(images.reshape(86, -1), axis=0)) == 86
    assert render([], CLEAN, generator()).shape == (0, IMAGE_SIZE, IMAGE_SIZE, 3)


@pytest.mark.parametrize("style", [CLEAN, SHIFTED], ids=["clean", "shifted"])
def test_the_same_generator_gives_the_same_images(style: Style) -> None:
    some = ALL_COMBINATIONS[::11]
    first = render(some, style, generator(3))
    assert np.array_equal(first, render(some, style, generator(3)))
    assert not np.array_equal(first, render(some, style, generator(4)))


def test_an_image_depends_on_its_own_item_only() -> None:
    some, seeds = ALL_COMBINATIONS[5:600:9], list(range(67))
    styles = [SHIFTED if seed % 2 else CLEAN for seed in seeds]
    together = render_each(some, styles, seeds)
    for i in (0, 1, 31, 32, 66):
        alone = render_each(some[i : i + 1], styles[i : i + 1], seeds[i : i + 1])[0]
        # A matrix product may round differently in another batch: by one step at most.
        assert np.abs(alone.astype(int) - together[i]).max() <= 1


def test_global_random_state_is_neither_read_nor_changed() -> None:
    np.random.seed(1)
    before: Any = np.random.get_state()
    first = render(ALL_COMBINATIONS[:20], SHIFTED, generator())
    held_out()
    style_around(SHIFTED, generator(), 1.0)
    after: Any = np.random.get_state()
    assert before[2] == after[2]
    assert np.array_equal(before[1], after[1])
    np.random.seed(2)
    assert np.array_equal(first, render(ALL_COMBINATIONS[:20], SHIFTED, generator()))


@pytest.mark.parametrize("colour", COLOURS)
def test_a_plain_circle_has_its_colour_in_the_middle(colour: str) -> None:
    images = render([Combination(colour, "plain", "circle")] * 20, CLEAN, generator())
    middle = images[:, 20:28, 20:28].mean(axis=(0, 1, 2)) / 255
    assert np.abs(middle - np.clip(COLOURS[colour], 0, 1)).max() < 0.05


def test_a_red_plain_circle_is_red_inside_and_not_in_the_corners() -> None:
    images = render([Combination("red", "plain", "circle")] * 50, CLEAN, generator()).astype(int)
    redness = images[..., 0] - np.maximum(images[..., 1], images[..., 2])
    assert redness[:, 24, 24].min() > 150
    assert redness[:, [0, 0, -1, -1], [0, -1, 0, -1]].max() < 120


def test_fills_and_outlines_change_the_picture() -> None:
    colour, seed = "blue", [7]
    for pick in (
        [Combination(colour, fill, "square") for fill in FILLS],
        [Combination(colour, "plain", outline) for outline in OUTLINES],
    ):
        images = [render_each([c], [STEADY], seed)[0].astype(float) for c in pick]
        gaps = [np.abs(a - b).mean() for i, a in enumerate(images) for b in images[:i]]
        assert min(gaps) > 1.5


def test_a_hollow_outline_shows_the_background() -> None:
    shown = [Combination("black", fill, "circle") for fill in ("plain", "hollow")]
    plain, hollow = render_each(shown, [STEADY] * 2, [5, 5]).astype(int)
    assert plain[24, 24].max() < 40 < hollow[24, 24].max()


@pytest.mark.parametrize(
    "change",
    [
        {"rotation": 40.0},
        {"jitter": 90.0},
        {"hue": 30.0},
        {"gain": (1.2, 1.0, 0.7)},
        {"contrast": 0.5},
        {"brightness": 0.2},
        {"blur": 1.0},
        {"noise": 0.1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_style_changes_pixels(change: dict[str, Any]) -> None:
    some = ALL_COMBINATIONS[::50]
    plain = render(some, CLEAN, generator()).astype(float)
    changed = render(some, replace(CLEAN, **change), generator()).astype(float)
    assert np.abs(plain - changed).mean() > 1


def test_contrast_and_blur_do_what_they_say() -> None:
    some = ALL_COMBINATIONS[::10]
    plain = render(some, CLEAN, generator()).astype(float)
    washed = render(some, replace(CLEAN, contrast=0.5), generator()).astype(float)
    assert np.allclose(washed - 127.5, (plain - 127.5) / 2, atol=1.1)
    blurred = render(some, replace(CLEAN, blur=1.5), generator()).astype(float)
    assert np.abs(np.diff(blurred, axis=1)).mean() < 0.7 * np.abs(np.diff(plain, axis=1)).mean()
    assert abs(blurred.mean() - plain.mean()) < 1


@pytest.mark.parametrize(
    "field", ["rotation", "jitter", "hue", "contrast", "brightness", "blur", "noise"]
)
def test_a_style_outside_its_range_is_refused(field: str) -> None:
    for value in (1000.0, float("nan")):
        fields: dict[str, Any] = {field: value}
        with pytest.raises(ValueError, match=field):
            Style(**fields)


def test_a_gain_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="gain"):
        Style(gain=(1.0, 0.0, 1.0))


def test_client_styles_differ_and_stay_near_the_base() -> None:
    draws = generator()
    clients = [style_around(SHIFTED, draws, 1.0) for _ in range(50)]
    assert len(set(clients)) == 50
    assert all(abs(c.rotation - SHIFTED.rotation) <= 10 for c in clients)
    assert all(abs(c.hue - SHIFTED.hue) <= 12 for c in clients)
    assert clients[0] == style_around(SHIFTED, generator(), 1.0)
    assert style_around(SHIFTED, generator(), 0.0) == SHIFTED
    # However wide the spread, every drawn style is valid.
    assert all(astuple(style_around(SHIFTED, draws, 50.0)) for _ in range(50))
    with pytest.raises(ValueError, match="spread"):
        style_around(SHIFTED, draws, -1.0)


def test_unknown_words_and_unequal_lengths_are_refused() -> None:
    for wrong in (
        Combination("mauve", "plain", "star"),
        Combination("red", "furry", "star"),
        Combination("red", "star", "plain"),
        Combination("red", "plain", "cube"),
    ):
        with pytest.raises(KeyError):
            render([wrong], CLEAN, generator())
    with pytest.raises(ValueError, match="zip"):
        render_each(ALL_COMBINATIONS[:2], [CLEAN], [1, 2])
