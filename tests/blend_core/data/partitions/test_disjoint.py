"""Every class at one client: the released code's lists to the item, and its defects refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blend_core.data.partitions.disjoint import disjoint
from blend_core.errors import ConfigError

FIXTURE = Path(__file__).parents[3] / "fixtures" / "partition_disjoint.json"
CASES: list[dict[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_who_gets_what_equals_the_released_code(case: dict[str, Any]) -> None:
    labels = [k for k in range(case["n_classes"]) for _ in range(case["train_per_class"])]
    parts = disjoint(labels, case["clients"], case["shots"], 2023, "round")
    assert len(CASES) == 4
    assert parts == [client["train"] for client in case["result"]]
    for part, client in zip(parts, case["result"], strict=True):
        assert {labels[i] for i in part} == set(client["classes_in_shuffled_order"])


def sizes(classes: int, clients: int, blocks: Any) -> list[int]:
    parts = disjoint(list(range(classes)), clients, None, 2023, blocks)
    return [len(part) for part in parts]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (19, [2] * 9 + [1]),
        (24, [2] * 9 + [6]),
        (50, [5] * 10),
        (51, [5] * 9 + [6]),
        (98, [10] * 9 + [8]),
        (199, [20] * 9 + [19]),
        (500, [50] * 10),
    ],
)
def test_round_blocks_have_the_sizes_of_the_released_code(classes, expected) -> None:
    assert sizes(classes, 10, "round") == expected


@pytest.mark.parametrize(
    ("classes", "expected"),
    [(24, [3] * 4 + [2] * 6), (19, [2] * 9 + [1]), (51, [6] + [5] * 9), (10, [1] * 10)],
)
def test_balanced_blocks_differ_by_one_class_larger_ones_first(classes, expected) -> None:
    assert sizes(classes, 10, "balanced") == expected


@pytest.mark.parametrize(("classes", "blocks"), [(9, "balanced"), (5, "round"), (18, "round")])
def test_a_client_without_a_class_is_refused_and_named(classes: int, blocks: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{classes} classes leave client \d of 10 without one"):
        sizes(classes, 10, blocks)


def test_a_class_with_fewer_images_than_shots_gives_all_it_has() -> None:
    [only] = disjoint([0, 0, 0, 1], 1, 2, 5)
    assert sorted(only)[-1] == 3
    assert len(only) == 3
