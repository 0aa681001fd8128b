"""The built-in benchmark as a federation, and which clients it has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blend_core.config import Experiment, parse_experiment
from blend_core.data import ClientData, Preprocess, client_names, load_client_data
from blend_core.data.folders import FolderOptions
from blend_core.data.partitions.preferred import dirichlet_preferred
from blend_core.data.shapes import benchmark_classes
from blend_core.data.shapes_benchmark import client_style, load_shapes
from blend_core.errors import ConfigError

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PRE = Preprocess(48, MEAN, STD)

OPTIONS = FolderOptions("node", (), "a photo of a {}.")


def experiment(clients: int = 10, seed: int = 0, **data: Any) -> Experiment:
    data = {"kind": "shapes", "shots": 4, "test_per_class": 2, **data}
    return parse_experiment({"seed": seed, "clients": clients, "data": data})


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def pictures(data: ClientData) -> list[Tensor]:
    return [*data.train.images, *data.test_base.images, *data.test_new.images]


def test_a_client_has_its_part_of_the_pool_and_every_test_class() -> None:
    chosen = experiment(partition_seed=1)
    labels = [k for k in range(20) for _ in range(4)]
    part = dirichlet_preferred(labels, 10, 4, 0.01, 1.0, seed=1)[3]
    data = load_shapes(chosen, 3, PRE)
    classes = benchmark_classes()
    assert data.base_names == tuple(c.name for c in classes.base)
    assert data.new_names == tuple(c.name for c in classes.new)
    assert data.train.labels.tolist() == [labels[i] for i in part]
    assert data.local_classes == {labels[i] for i in part}
    every_class_twice = [k for k in range(20) for _ in range(2)]
    assert data.test_base.labels.tolist() == every_class_twice
    assert data.test_new.labels.tolist() == every_class_twice
    assert {(i.dtype, tuple(i.shape)) for i in pictures(data)} == {(torch.uint8, (3, 48, 48))}


def test_all_clients_share_the_pool_without_an_image_left_or_doubled() -> None:
    # With one style for all, two equal pictures could only be the same item of the pool.
    chosen = experiment(style_spread=0.0)
    parts = [load_shapes(chosen, index, PRE).train for index in range(10)]
    assert sum(map(len, parts)) == 80
    assert len({i.numpy().tobytes() for part in parts for i in part.images}) == 80


def test_development_has_the_benchmarks_size_and_none_of_its_classes() -> None:
    data = load_shapes(experiment(split="development"), 0, PRE)
    classes = benchmark_classes()
    assert data.base_names == tuple(c.name for c in classes.development)
    assert len(set(data.new_names)) == 20
    mine = {c.name for c in (*classes.base, *classes.new)}
    assert not mine & {*data.base_names, *data.new_names}
    assert not set(data.base_names) & set(data.new_names)


def test_loading_again_gives_the_same_bytes() -> None:
    first, again = (load_shapes(experiment(), 2, PRE) for _ in range(2))
    assert same(pictures(first), pictures(again))


def test_an_image_does_not_depend_on_how_many_others_there_are() -> None:
    few = load_shapes(experiment(test_per_class=2), 2, PRE)
    many = load_shapes(experiment(test_per_class=5), 2, PRE)
    kept = [5 * k + number for k in range(20) for number in range(2)]
    assert same(few.test_base.images, [many.test_base.images[i] for i in kept])
    assert same(few.test_new.images, [many.test_new.images[i] for i in kept])


def test_training_and_test_images_are_never_the_same() -> None:
    data = load_shapes(experiment(), 0, PRE)
    assert len({i.numpy().tobytes() for i in pictures(data)}) == len(pictures(data))


def test_seeds_choose_images_and_partition_apart() -> None:
    plain = load_shapes(experiment(), 0, PRE)
    other_images = load_shapes(experiment(fewshot_seed=9), 0, PRE)
    other_partition = load_shapes(experiment(partition_seed=9), 0, PRE)
    assert plain.train.labels.tolist() == other_images.train.labels.tolist()
    assert not same(plain.test_base.images, other_images.test_base.images)
    assert plain.train.labels.tolist() != other_partition.train.labels.tolist()
    assert same(plain.test_base.images, other_partition.test_base.images)


def test_every_client_has_a_style_of_its_own_that_stays() -> None:
    styles = [client_style(experiment(), index) for index in range(10)]
    assert len(set(map(repr, styles))) == 10
    assert client_style(experiment(clients=20, shots=8), 7) == styles[7]
    assert client_style(experiment(seed=1), 7) != styles[7]
    assert len({repr(client_style(experiment(style_spread=0.0), k)) for k in range(10)}) == 1


def test_clients_have_test_images_of_their_own() -> None:
    chosen = experiment(style_spread=0.0)
    first, second = (load_shapes(chosen, index, PRE).test_base.images for index in (0, 1))
    assert not {i.numpy().tobytes() for i in first} & {i.numpy().tobytes() for i in second}


def test_another_backbone_size_is_reached_by_resizing() -> None:
    data = load_shapes(experiment(), 0, Preprocess(96, MEAN, STD))
    assert {tuple(i.shape) for i in data.test_base.images} == {(3, 96, 96)}
    assert {tuple(i.shape) for i in data.train.images} == {(3, 48, 48)}
    small = load_shapes(experiment(), 0, Preprocess(8, MEAN, STD))
    assert {tuple(i.shape) for i in small.train.images} == {(3, 32, 32)}  # 4 x 8


def test_a_client_of_the_real_size_loads_quickly() -> None:
    load_shapes(experiment(), 0, PRE)  # the renderer's tables, once per process
    start = time.process_time()
    load_shapes(experiment(shots=16, test_per_class=10), 0, PRE)
    assert time.process_time() - start < 2.0  # 0.3 s on a laptop


def test_names_are_numbered_by_partition() -> None:
    assert client_names(experiment(clients=3)) == ["client-00", "client-01", "client-02"]
    names = client_names(experiment(clients=101))
    assert names is not None
    assert (names[0], names[100]) == ("client-000", "client-100")
    assert names == sorted(names)


def test_a_client_is_found_by_partition_or_by_name() -> None:
    direct = load_shapes(experiment(), 4, PRE)
    for name, partition in (("client-04", None), ("clinic-oslo", 4)):
        loaded = load_client_data(experiment(), name, partition, None, OPTIONS, PRE, 1.0)
        assert same(pictures(direct), pictures(loaded))


@pytest.mark.parametrize("index", [-1, 10])
def test_a_partition_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match=r"clients = 10, so partitions are 0 to 9"):
        load_client_data(experiment(), "client-00", index, None, OPTIONS, PRE, 1.0)


def test_a_name_without_a_partition_must_be_one_of_the_benchmark() -> None:
    with pytest.raises(ConfigError, match=r"clinic-oslo: .*client-00 to client-09.*partition-id"):
        load_client_data(experiment(), "clinic-oslo", None, None, OPTIONS, PRE, 1.0)


def test_a_site_with_own_images_is_not_silently_given_rendered_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.kind = shapes .* set data\.kind=folders"):
        load_client_data(experiment(), "client-00", 0, tmp_path, OPTIONS, PRE, 1.0)


def test_too_few_images_for_so_many_clients_say_so() -> None:
    with pytest.raises(ConfigError, match=r"20 images in all\); set fewer clients or more shots"):
        load_shapes(experiment(clients=21, shots=1), 0, PRE)
