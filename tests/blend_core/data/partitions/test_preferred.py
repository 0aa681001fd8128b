"""The partition of the papers' table, to the item."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blend_core.data import manifest
from blend_core.data.manifest import Part
from blend_core.data.partitions.preferred import dirichlet_preferred
from blend_core.data.records import Dataset, Record
from blend_core.errors import ConfigError

FIXTURE = Path(__file__).parents[3] / "fixtures" / "partition_blend.json"
CASES: list[dict[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))["cases"]


def train_labels(case: dict[str, Any]) -> list[int]:
    if case["train_labels"] == "repeat":
        return [k for k in range(case["n_classes"]) for _ in range(case["train_per_class"])]
    labels: list[int] = case["train_labels"]
    return labels


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_who_gets_what_equals_the_released_code(case: dict[str, Any]) -> None:
    labels = train_labels(case)
    parts = dirichlet_preferred(
        labels, case["clients"], case["shots"], case["alpha"], case["boost"], seed=1
    )
    assert len(CASES) == 6
    assert parts == [client["train"] for client in case["result"]]
    names = tuple(f"class {k}" for k in range(case["n_classes"]))
    tested = tuple(
        Record(f"{name}/{i}.jpg", label, name)
        for label, name in enumerate(names)
        for i in range(case["test_per_class"])
    )
    source = Dataset("dtd", names, train=(), val=(), test=tested)
    for part, client in zip(parts, case["result"], strict=True):
        assert sorted({labels[i] for i in part}) == client["classes"]
        own = Part(client["id"], None, tuple(part), None, tuple(client["classes"]))
        # The released code lists them class by class as these were dealt; here they ascend.
        assert list(manifest.test_items(source, own)) == sorted(client["test"])


# PROTOCOL 3a: base classes, images per client, classes per client.
TABLE = [
    (5, "15 15 15 5 15 1 1 1 11 1", "1 1 1 1 1 1 1 1 1 1"),
    (19, "33 32 27 28 31 30 36 31 39 17", "3 2 3 3 2 2 5 2 4 2"),
    (24, "49 48 43 44 31 30 36 31 39 33", "4 3 4 4 2 2 5 2 4 3"),
    (50, "73 105 64 83 89 83 71 70 85 77", "7 7 7 8 6 6 8 6 8 6"),
    (51, "89 105 64 83 89 83 71 70 85 77", "8 7 7 8 6 6 8 6 8 6"),
    (98, "172 185 139 165 169 159 131 150 144 154", "14 12 12 14 12 11 14 11 13 14"),
    (500, "820 788 851 831 830 764 764 754 813 785", "70 61 78 71 66 64 66 56 61 60"),
]


@pytest.mark.parametrize(("classes", "images", "held"), TABLE)
def test_the_table_of_the_protocol(classes: int, images: str, held: str) -> None:
    labels = [k for k in range(classes) for _ in range(16)]
    parts = dirichlet_preferred(labels, 10, 16, 0.01, 1.0, seed=1)
    assert [len(part) for part in parts] == [int(n) for n in images.split()]
    assert [len({labels[i] for i in part}) for part in parts] == [int(n) for n in held.split()]
    assert sorted(i for part in parts for i in part) == list(range(16 * classes))


def test_no_item_twice_and_no_more_than_shots_of_a_class() -> None:
    labels = [k for k in range(12) for _ in range(5 + 3 * k)]
    parts = dirichlet_preferred(labels, 7, 16, 0.5, 1.0, seed=3)
    items = [i for part in parts for i in part]
    assert all(parts)
    assert len(set(items)) == len(items)
    counts = np.bincount([labels[i] for i in items], minlength=12)
    assert (counts[4:] == 16).all()  # classes 4 and up have 17 images or more
    assert (counts <= 16).all()


def test_the_partition_seed_matters_and_zero_is_a_seed() -> None:
    labels = [k for k in range(20) for _ in range(16)]
    zero, one = (dirichlet_preferred(labels, 10, 16, 0.01, 1.0, seed) for seed in (0, 1))
    assert zero == dirichlet_preferred(labels, 10, 16, 0.01, 1.0, 0)
    assert zero != one


def test_global_random_state_is_neither_read_nor_changed() -> None:
    labels = [k for k in range(5) for _ in range(16)]
    random.seed(5)
    state, numpy_state = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].copy()
    first = dirichlet_preferred(labels, 10, 16, 0.01, 1.0, 1)
    assert random.getstate() == state
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy_state)
    random.seed(6)
    assert dirichlet_preferred(labels, 10, 16, 0.01, 1.0, 1) == first


def test_one_image_per_client_is_just_enough() -> None:
    parts = dirichlet_preferred([0, 0, 0], 3, 3, 0.01, 1.0, 1)
    assert sorted(map(len, parts)) == [1, 1, 1]


def test_more_clients_than_images_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"clients = 4: client \d gets no training image"
    ) as error:
        dirichlet_preferred([0, 0, 0], 4, 3, 0.01, 1.0, 1)
    assert "3 images in all" in str(error.value)
    assert "set fewer clients or more shots" in str(error.value)
