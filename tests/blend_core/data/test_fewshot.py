"""Few-shot draws and the base/new split."""

from __future__ import annotations

import random

import numpy as np
import pytest

from blend_core.data.fewshot import few_shot, split_base_new

LABELS = [2] * 5 + [0] * 3 + [1] * 8


def test_every_class_gives_shots_items_in_order_of_first_appearance() -> None:
    chosen = few_shot(LABELS, 4, seed=0)
    assert [LABELS[i] for i in chosen] == [2] * 4 + [0] * 3 + [1] * 4
    assert len(set(chosen)) == len(chosen)


def test_a_class_with_fewer_gives_all_it_has_without_repetition() -> None:
    assert few_shot(LABELS, 100, seed=0) == list(range(16))


def test_the_draw_repeats_and_varies_with_the_seed() -> None:
    labels = [0] * 100
    first = few_shot(labels, 10, seed=0)
    assert first == few_shot(labels, 10, seed=0)
    assert first != few_shot(labels, 10, seed=1)


def test_a_class_is_drawn_alike_whatever_other_classes_there_are() -> None:
    with_others = few_shot([1] * 50 + [0] * 50, 5, seed=3)
    assert with_others[:5] == few_shot([1] * 50, 5, seed=3)


def test_all_items_can_be_drawn() -> None:
    drawn = {i for seed in range(200) for i in few_shot([0] * 8, 1, seed)}
    assert drawn == set(range(8))


def test_the_draw_ignores_and_keeps_global_random_state() -> None:
    np.random.seed(1)
    random.seed(1)
    state = random.getstate()
    first = few_shot([0] * 100, 10, seed=0)
    assert random.getstate() == state
    np.random.seed(2)
    assert few_shot([0] * 100, 10, seed=0) == first


def test_no_shots_are_refused() -> None:
    with pytest.raises(ValueError, match="shots must be 1 or more, not 0"):
        few_shot(LABELS, 0, seed=0)


def test_an_odd_number_of_classes_gives_base_the_larger_half() -> None:
    split = split_base_new([*range(36, -1, -1), 5, 5])
    assert split.base == tuple(range(19))
    assert split.new == tuple(range(19, 37))


def test_an_even_number_of_classes_is_halved_by_sorted_label() -> None:
    split = split_base_new([9, 3, 3, 7, 5])
    assert split.base == (3, 5)
    assert split.new == (7, 9)
