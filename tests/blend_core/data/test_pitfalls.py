"""Pitfalls of released code (PROTOCOL 8) that concern data: a test each, named after its row.

Those of training, aggregation, evaluation and results are in tests/test_pitfalls.py.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imitations import patch_description, write_cifar, write_coop, write_domains, write_imagenet

from blend_core.config import parse_experiment
from blend_core.data import ClientData, Preprocess, datasets
from blend_core.data.benchmark import dealt, load_benchmark, require_images, shared_images
from blend_core.data.datasets import describe, read_dataset, read_image
from blend_core.data.dealing import deal
from blend_core.data.manifest import write_manifest
from blend_core.data.partitions.dirichlet import dirichlet
from blend_core.data.records import Dataset, Record
from blend_core.data.unpickle import load_restricted
from blend_core.errors import ConfigError, SiteError

PRE = Preprocess(
    32, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), "bicubic"
)


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("office")
    write_domains(root, "office_caltech10", images=True)
    return root


@pytest.fixture(scope="module")
def dtd(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("dtd")
    write_coop(root, "dtd", images=True)
    return root


def experiment(kind: str, clients: int = 10, **data: Any):
    return parse_experiment({"clients": clients, "data": {"kind": kind, **data}})


def load(root: Path, index: int, kind: str, clients: int = 10, **data: Any) -> ClientData:
    return load_benchmark(experiment(kind, clients, **data), index, root, PRE, 1.0)


def test_p01_every_images_label_is_its_parent_folder_also_inside_one_clients_part(office) -> None:
    dataset, manifest = dealt(experiment("office_caltech10", 12), office)
    for record in (*dataset.train, *dataset.test):
        assert dataset.names[record.label] == Path(record.path).parent.name
    data = load(office, 7, "office_caltech10", 12)
    part = manifest.clients[7]
    wanted = [dataset.train[i] for i in part.train]
    for position in (0, len(wanted) // 2, len(wanted) - 1):
        # In the imitation all images of a class are one picture, and classes differ.
        assert torch.equal(
            data.train.images[position], read_image("office_caltech10", office, wanted[position])
        )
        assert int(data.train.labels[position]) == wanted[position].label


def test_p02_names_are_an_ordered_list_that_fits_the_label_ids(office) -> None:
    dataset = read_dataset("office_caltech10", office)
    assert dataset.names == tuple(describe("office_caltech10").classes)
    with pytest.raises(SiteError, match="is called 'mug', but label 0 is 'back_pack'"):
        Dataset("x", ("back_pack", "mug"), (Record("a/mug/1", 0, "mug"),), (), ())


def test_p06_which_domain_a_client_has_comes_from_the_manifest(office) -> None:
    dataset, manifest = dealt(experiment("office_caltech10", 12), office)
    assert [p.domain for p in manifest.clients] == [
        domain for domain in ("amazon", "caltech", "dslr", "webcam") for _ in range(3)
    ]
    for part in manifest.clients:
        assert {dataset.train[i].domain for i in part.train} == {part.domain}
    data = load(office, 11, "office_caltech10", 12)
    assert data.origin is not None
    assert data.origin.domain == "webcam"
    with pytest.raises(ConfigError, match="multiple of the 4 domains"):
        dealt(experiment("office_caltech10", 9), office)


def test_p07_no_training_image_is_a_test_image_by_path_or_content(tmp_path: Path) -> None:
    write_domains(tmp_path, "pacs")
    dataset = read_dataset("pacs", tmp_path)
    assert not {r.path for r in dataset.train} & {r.path for r in dataset.test}
    for record in (*dataset.train, *dataset.test):
        file = tmp_path / record.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record.path)
    assert shared_images(dataset, tmp_path) == []
    copied, copy = dataset.train[7], dataset.test[3]
    shutil.copyfile(tmp_path / copied.path, tmp_path / copy.path)
    # Two training images that are alike do not make scores too high.
    shutil.copyfile(tmp_path / dataset.train[0].path, tmp_path / dataset.train[1].path)
    assert shared_images(dataset, tmp_path) == [(copied, copy)]
    with pytest.raises(SiteError, match="is listed 2 times"):
        Dataset("x", ("a",), (Record("a/1", 0, "a"),), (), (Record("a/1", 0, "a"),))


@pytest.mark.parametrize("data", [{}, {"shots": 0}, {"max_test_per_class": 1}, {"subset": "all"}])
def test_p08_training_never_gets_a_test_image_however_much_is_trained_on(dtd, data) -> None:
    dataset, manifest = dealt(experiment("dtd", **data), dtd)
    trained = {dataset.train[i].path for part in manifest.clients for i in part.train}
    assert not trained & {record.path for record in dataset.test}
    # How much is trained on and how much is evaluated are two settings.
    one = load(dtd, 0, "dtd", shots=1, max_test_per_class=1)
    assert len(one.test_base) == 24
    assert len(one.test_new) == 23
    assert Counter(one.train.labels.tolist()).most_common(1)[0][1] == 1


def test_p09_no_data_function_touches_a_global_generator(dtd, office) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)

    def states() -> tuple[Any, ...]:
        numpy_state = np.random.get_state()
        return random.getstate(), numpy_state[1].tobytes(), torch.get_rng_state().tolist()

    before = states()
    load(dtd, 0, "dtd", max_test_per_class=1)
    load(office, 0, "office_caltech10", 12)
    assert states() == before


def test_p10_classes_of_equal_size_do_not_get_the_same_shares() -> None:
    labels = [i % 6 for i in range(600)]
    splits = dirichlet(labels, labels, 5, 0.5, 2, 0, "a domain")
    by_class = {
        tuple(Counter(labels[i] for i in train)[k] for train, _ in splits) for k in range(6)
    }
    assert len(by_class) == 6


def test_p11_nothing_is_reused_after_a_split_file_or_manifest_was_edited_in_place(
    tmp_path: Path,
) -> None:
    file = write_coop(tmp_path, "dtd")
    dataset, manifest = dealt(experiment("dtd"), tmp_path)
    assert read_dataset("dtd", tmp_path) is dataset  # Unchanged, it is read once.
    assert dataset.train[0].path.startswith("dtd/images/")  # No absolute paths.
    write_manifest(tmp_path / "manifest.json", manifest)
    given = experiment("dtd", manifest=str(tmp_path / "manifest.json"))
    assert dealt(given, tmp_path)[1] == manifest

    swapped = json.loads((tmp_path / "manifest.json").read_text())
    swapped["clients"][0]["train"].reverse()
    (tmp_path / "manifest.json").write_text(json.dumps(swapped))
    assert dealt(given, tmp_path)[1].clients[0].train == manifest.clients[0].train[::-1]

    lists = json.loads(file.read_text())
    lists["train"].reverse()
    file.write_text(json.dumps(lists))
    assert read_dataset("dtd", tmp_path).train[0] == dataset.train[-1]
    assert dealt(experiment("dtd"), tmp_path)[1].sha256() != manifest.sha256()
    with pytest.raises(ConfigError, match="made from other lists of images"):
        dealt(given, tmp_path)


def test_p11_a_renamed_file_or_class_folder_is_seen(tmp_path: Path) -> None:
    write_domains(tmp_path, "office31")
    before = read_dataset("office31", tmp_path)
    first = tmp_path / before.train[0].path
    first.rename(first.with_name(f"0-first{first.suffix}"))
    assert read_dataset("office31", tmp_path).train[0].path.endswith(f"0-first{first.suffix}")


def test_p11_a_split_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch
) -> None:
    file = write_coop(tmp_path, "dtd")
    lists = json.loads(file.read_text())
    real, edits = datasets._read, iter([lists["train"][::-1]])

    def edited(kind: str, root: Path) -> Dataset:
        found = real(kind, root)
        for train in edits:
            file.write_text(json.dumps({**lists, "train": train}))
        return found

    monkeypatch.setattr(datasets, "_read", edited)
    first = read_dataset("dtd", tmp_path).train[0].path
    assert first.endswith(lists["train"][-1][0])


def test_p11_pixels_of_an_edited_cifar_batch_are_read_again(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100")
    dataset = read_dataset("cifar100", tmp_path)
    before = read_image("cifar100", tmp_path, dataset.test[0])
    file = tmp_path / dataset.test[0].path.partition("#")[0]
    content = load_restricted(file)
    content["data" if "data" in content else b"data"] = 255 - np.asarray(
        content["data" if "data" in content else b"data"]
    )
    file.write_bytes(pickle.dumps(content, protocol=2))
    assert torch.equal(read_image("cifar100", tmp_path, dataset.test[0]), 255 - before)


def test_p14_the_order_of_directory_listings_decides_nothing(tmp_path: Path, monkeypatch) -> None:
    write_domains(tmp_path, "office31")
    expected = read_dataset("office31", tmp_path)
    real_listdir, real_scandir = os.listdir, os.scandir

    class Reversed:
        def __init__(self, *args: Any) -> None:
            with real_scandir(*args) as found:
                self.entries = sorted(found, key=lambda e: e.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_: object) -> None: ...

        def __iter__(self):
            return iter(self.entries)

        def close(self) -> None: ...

    monkeypatch.setattr(os, "listdir", lambda *a: sorted(real_listdir(*a), reverse=True))
    monkeypatch.setattr(os, "scandir", Reversed)
    assert read_dataset("office31", tmp_path) == expected


def test_p19_the_last_client_does_not_get_three_times_the_classes(dtd) -> None:
    _, balanced = dealt(experiment("dtd", partition="disjoint"), dtd)
    assert sorted({len(part.classes) for part in balanced.clients}) == [2, 3]
    # The released code's sizes exist under their own name.
    _, as_released = dealt(experiment("dtd", partition="disjoint", blocks="round"), dtd)
    assert [len(part.classes) for part in as_released.clients] == [2] * 9 + [6]


def test_p22_a_class_that_a_domains_test_list_lacks_shifts_no_name(tmp_path: Path) -> None:
    write_domains(tmp_path, "office_caltech10")
    file = tmp_path / "office_caltech_10" / "webcam_test.pkl"
    paths, names = load_restricted(file)
    kept = names != "bike"
    file.write_bytes(pickle.dumps((paths[kept], names[kept]), protocol=2))
    wrong = (~kept).sum()
    with pytest.MonkeyPatch.context() as patch:
        counts = {"train": 2025, "val": 0, "test": 508 - int(wrong)}
        patch_description(patch, "office_caltech10", counts=counts)
        dataset = read_dataset("office_caltech10", tmp_path)
    assert dataset.names == tuple(describe("office_caltech10").classes)
    assert all(dataset.names[r.label] == Path(r.path).parent.name for r in dataset.test)


def test_p23_imagenets_names_are_words_and_its_order_is_that_of_sorted_folders(
    tmp_path: Path, monkeypatch
) -> None:
    names = ["tench", "missile", "goldfish", "missile"]
    counts = {"train": 12, "val": 0, "test": 8}
    patch_description(monkeypatch, "imagenet", classes=4, counts=counts)
    write_imagenet(tmp_path, names, 3, 2)
    dataset = read_dataset("imagenet", tmp_path)
    assert dataset.names == tuple(names)
    assert [r.label for r in dataset.train] == sorted(r.label for r in dataset.train)
    assert dataset.val == ()  # No part of the training images is set aside.
    assert read_dataset("imagenet", tmp_path) == dataset


def test_p24_cifar_is_normalised_with_clips_statistics_unless_the_papers_mode_is_asked_for(
    tmp_path: Path,
) -> None:
    write_cifar(tmp_path, "cifar10")
    settings: dict[str, Any] = {"max_test_per_class": 1, "shots": 2, "partition": "iid"}
    data = load(tmp_path, 0, "cifar10", **settings)
    assert data.preprocess is not None
    assert (data.preprocess.mean, data.preprocess.std) == (PRE.mean, PRE.std)
    assert (data.preprocess.crop, data.preprocess.flip) == (False, True)
    paper = load(tmp_path, 0, "cifar10", **settings, cifar_stats=True)
    assert paper.preprocess is not None
    assert paper.preprocess.mean == (0.4914, 0.4822, 0.4465)
    assert paper.preprocess.resize_last


def test_p25_missing_images_are_counted_and_named_before_anything_runs(tmp_path: Path) -> None:
    write_coop(tmp_path, "dtd", images=True)
    gone = tmp_path / "dtd" / "images" / "class_003"
    shutil.rmtree(gone)
    with pytest.raises(SiteError) as caught:
        require_images(experiment("dtd"), tmp_path)
    # 16 shots and 36 test images of class 3.
    assert "52 of 2076 images are missing" in str(caught.value)
    assert str(gone) in str(caught.value)
    assert "and 49 more" in str(caught.value)


def test_p26_a_client_without_images_is_named_with_its_rule(dtd) -> None:
    with pytest.raises(ConfigError, match=r"partition disjoint.*24 classes leave client 24 of 25"):
        dealt(experiment("dtd", 25, partition="disjoint"), dtd)
    with pytest.raises(ConfigError, match=r"clients = 500: client \d+ gets no training image"):
        dealt(experiment("dtd", 500), dtd)


def test_p27_draws_have_a_cap_and_no_division_by_zero() -> None:
    labels = [i % 2 for i in range(4000)]
    refused = pytest.raises(ConfigError, match=r"beta 0.001, 300 clients")
    with np.errstate(divide="raise", invalid="raise"), refused:
        dirichlet(labels, labels, 300, 0.001, 10, 0)


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


@pytest.mark.parametrize(
    ("kind", "file"),
    [("office_caltech10", "amazon_train.pkl"), ("cifar10", "batches.meta")],
)
def test_p28_a_hostile_list_runs_nothing(tmp_path: Path, kind: str, file: str) -> None:
    folder = write_cifar(tmp_path, kind) if kind == "cifar10" else write_domains(tmp_path, kind)
    mark = tmp_path / "ran"
    (folder / file).write_bytes(pickle.dumps({"label_names": Hostile(mark)}))
    with pytest.raises(SiteError, match=file):
        read_dataset(kind, tmp_path)
    assert not mark.exists()


def test_p30_classes_come_from_the_definition_not_from_the_largest_label_that_occurs() -> None:
    names = tuple(f"class {k}" for k in range(5))
    train = tuple(Record(f"{k}/{i}", k, names[k]) for k in range(4) for i in range(20))
    test = tuple(Record(f"{k}/t{i}", k, names[k]) for k in range(5) for i in range(2))
    dataset = Dataset("dtd", names, train, (), test)
    manifest = deal(dataset, experiment("dtd", 2))
    assert manifest.class_names == names
    # Base is ceil(5 / 2) = 3 although training knows four classes.
    assert {label for part in manifest.clients for label in part.classes} == {0, 1, 2}
