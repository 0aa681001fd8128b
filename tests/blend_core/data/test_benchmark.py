"""A client's part of a data set: what is trained on, what is measured, what is shared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from imitations import entries, write_cifar, write_coop

from blend_core.config import parse_experiment
from blend_core.data import ClientData, Preprocess, benchmark, class_names, prompt_template
from blend_core.data.benchmark import dealt, load_benchmark
from blend_core.data.records import Record
from blend_core.errors import ConfigError, SiteError

PRE = Preprocess(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    write_coop(folder, "dtd", images=True)
    write_cifar(folder, "cifar100")
    return folder


def experiment(kind: str = "dtd", clients: int = 10, **data: Any):
    return parse_experiment({"clients": clients, "data": {"kind": kind, **data}})


def load(root: Path, index: int, image_memory: float = 1.0, **settings: Any) -> ClientData:
    return load_benchmark(experiment(**settings), index, root, PRE, image_memory)


def test_local_base_and_novel_are_those_of_the_papers(root: Path) -> None:
    data = load(root, 3, partition_seed=1)
    names = [f"class_{k:03d}" for k in range(47)]
    assert data.base_names == tuple(names[:24])
    assert data.new_names == tuple(names[24:])
    tested = Counter(label for _, label, _ in entries("dtd")["test"])
    assert len(data.test_base) == sum(tested[k] for k in range(24)) == 864
    assert len(data.test_new) == sum(tested[k] for k in range(24, 47)) == 828
    assert data.test_new.labels.tolist()[0] == 0  # relabelled from 24
    # PROTOCOL 3a: client 3 has 44 images of 4 classes.
    assert len(data.train) == 44
    assert len(data.local_classes) == 4
    assert data.local_classes == set(data.train.labels.tolist())


def test_with_all_classes_there_are_no_new_ones(root: Path) -> None:
    data = load(root, 0, subset="all", max_test_per_class=2)
    assert len(data.base_names) == 47
    assert data.new_names == ()
    assert len(data.test_base) == 94


def test_images_read_beside_a_bad_one_are_not_decoded_again(tmp_path: Path, monkeypatch) -> None:
    write_coop(tmp_path, "dtd", images=True)
    dataset, manifest = dealt(experiment(), tmp_path)
    bad = tmp_path / dataset.train[manifest.clients[0].train[0]].path
    whole = bad.rename(tmp_path / "whole")
    bad.write_bytes(b"no image")
    read: list[str] = []
    original = benchmark.read_image

    def counted(kind: str, root: Path, record: Record):
        read.append(record.path)
        return original(kind, root, record)

    monkeypatch.setattr(benchmark, "read_image", counted)
    with pytest.raises(SiteError, match=bad.name):
        load(tmp_path, 0, max_test_per_class=1)
    whole.replace(bad)
    load(tmp_path, 0, max_test_per_class=1)
    trained = [dataset.train[i].path for i in manifest.clients[0].train]
    assert [read.count(path) for path in trained] == [2] + [1] * (len(trained) - 1)


def test_own_test_images_are_all_local_also_of_classes_not_trained_on(root: Path) -> None:
    settings: dict[str, Any] = {"kind": "cifar100", "partition": "pachinko"}
    dataset, manifest = dealt(experiment(clients=100, **settings), root)
    part = manifest.clients[4]
    data = load(root, 4, clients=100, **settings, max_test_per_class=1)
    assert part.test is not None
    tested = {dataset.test[i].label for i in part.test}
    assert len(data.test_base) == len(tested)
    assert data.local_classes == set(range(100))
    assert len(data.test_new) == 0
    assert data.train.images[0].shape == (3, 32, 32)


def test_clients_of_one_process_decode_an_image_once(root: Path, monkeypatch) -> None:
    from blend_core.data import benchmark

    read: list[str] = []
    original = benchmark.read_image

    def counted(kind: str, root: Path, record: Any) -> torch.Tensor:
        read.append(record.path)
        return original(kind, root, record)

    monkeypatch.setattr(benchmark, "read_image", counted)
    for index in (0, 1, 0):
        load(root, index, max_test_per_class=2)
    assert len(read) == len(set(read))


def test_images_in_a_file_are_the_same_as_in_memory(root: Path) -> None:
    in_memory = load(root, 2, max_test_per_class=1)
    in_file = load(root, 2, image_memory=0.0, max_test_per_class=1)
    for part in ("train", "test_base", "test_new"):
        pairs = zip(getattr(in_memory, part).images, getattr(in_file, part).images, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_prompts_are_one_for_all_or_the_data_sets_own(root: Path) -> None:
    assert prompt_template(experiment()) == "a photo of a {}."
    assert prompt_template(experiment(template="coop")) == "{} texture."
    pets = experiment("oxford_pets", template="coop")
    assert prompt_template(pets) == "a photo of a {}, a type of pet."
    with pytest.raises(ConfigError, match="template coop is for data sets of the papers"):
        experiment("shapes", template="coop")


def test_class_names_are_known_where_the_data_are(root: Path, tmp_path: Path) -> None:
    assert len(class_names(experiment(root=str(root)))) == 47
    assert class_names(experiment(root=str(tmp_path))) == ()
    assert class_names(experiment()) == ()


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    write_coop(tmp_path, "dtd", images=True)
    for file in (tmp_path / "dtd" / "images" / "class_000").iterdir():
        file.unlink()
        file.write_bytes(b"no image")
    with pytest.raises(SiteError, match=r"class_000/.*\.jpg: not a JPEG"):
        load(tmp_path, 0, clients=1)


def test_a_client_that_does_not_exist_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="client 10 does not exist: clients = 10"):
        load(root, 10)
