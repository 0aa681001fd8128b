"""Data sets as their own files describe them: counts, order, names, one line for what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imitations import (
    TEST_BASE,
    entries,
    patch_description,
    write_cifar,
    write_coop,
    write_domains,
    write_fgvc,
    write_imagenet,
)

from blend_core.config import DATASET_KINDS, parse_experiment
from blend_core.data.datasets import describe, descriptions, read_dataset, read_image
from blend_core.data.dealing import deal
from blend_core.data.fewshot import split_base_new
from blend_core.data.records import Dataset, require_files
from blend_core.data.unpickle import load_restricted
from blend_core.errors import ConfigError, SiteError

COOP = [kind for kind in DATASET_KINDS if describe(kind).reader == "coop"]
# Classes, training, validation and test images (PROTOCOL 1).
PUBLISHED = {
    "caltech101": (100, 4128, 1649, 2465),
    "oxford_pets": (37, 2944, 736, 3669),
    "stanford_cars": (196, 6509, 1635, 8041),
    "oxford_flowers": (102, 4093, 1633, 2463),
    "food101": (101, 50500, 20200, 30300),
    "fgvc_aircraft": (100, 3334, 3333, 3333),
    "sun397": (397, 15880, 3970, 19850),
    "dtd": (47, 2820, 1128, 1692),
    "eurosat": (10, 13500, 5400, 8100),
    "ucf101": (101, 7639, 1898, 3783),
    "imagenet": (1000, 1281167, 0, 50000),
    "cifar10": (10, 50000, 0, 10000),
    "cifar100": (100, 50000, 0, 10000),
    "domainnet10": (10, 18278, 0, 4573),
    "office_caltech10": (10, 2025, 0, 508),
}
# Classes and images where the split is a rule of ours; of the whole DomainNet no number is sure.
IN_ALL = {
    "domainnet345": (345, None),
    "pacs": (7, 9991),
    "office_home": (65, 15588),
    "office31": (31, 4110),
}


def refusal(kind: str, root: Path) -> str:
    with pytest.raises(SiteError) as caught:
        read_dataset(kind, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_descriptions_are_those_of_the_settings() -> None:
    assert tuple(descriptions()) == DATASET_KINDS
    for kind in DATASET_KINDS:
        assert describe(kind).template.count("{}") == 1
    with pytest.raises(ConfigError, match="'mnist' is no data set; known are caltech101, "):
        describe("mnist")


def test_the_descriptions_demand_the_published_numbers() -> None:
    assert {*PUBLISHED, *IN_ALL} == set(DATASET_KINDS)
    for kind, (classes, train, val, test) in PUBLISHED.items():
        assert describe(kind).class_count == classes
        assert describe(kind).counts == {"train": train, "val": val, "test": test}
    for kind, (classes, total) in IN_ALL.items():
        assert describe(kind).class_count == classes
        assert describe(kind).counts == ({} if total is None else {"total": total})


@pytest.mark.parametrize("kind", [k for k in COOP if k not in ("food101", "sun397")])
def test_split_files_keep_their_order_and_have_the_published_counts(
    kind: str, tmp_path: Path
) -> None:
    write_coop(tmp_path, kind)
    dataset = read_dataset(kind, tmp_path)
    expected = entries(kind)
    counts = (len(dataset.names), len(dataset.train), len(dataset.val), len(dataset.test))
    assert counts == PUBLISHED[kind]
    prefix = str(Path(describe(kind).folder) / describe(kind).images)
    for part in ("train", "val", "test"):
        records = getattr(dataset, part)
        assert [(r.path, r.label, r.class_name) for r in records] == [
            (f"{prefix}/{path}", label, name) for path, label, name in expected[part]
        ]
    base = set(split_base_new(range(len(dataset.names))).base)
    assert sum(r.label in base for r in dataset.test) == TEST_BASE[kind]


# PROTOCOL 3a.
IMAGES = {
    "oxford_pets": [33, 32, 27, 28, 31, 30, 36, 31, 39, 17],
    "dtd": [49, 48, 43, 44, 31, 30, 36, 31, 39, 33],
    "caltech101": [73, 105, 64, 83, 89, 83, 71, 70, 85, 77],
    "oxford_flowers": [89, 105, 64, 83, 89, 83, 71, 70, 85, 77],
}


@pytest.mark.skipif("BLEND_SPLITS" not in os.environ, reason="BLEND_SPLITS names no split files")
@pytest.mark.parametrize("kind", IMAGES)
def test_the_published_split_files_give_the_tables_of_the_papers(kind: str, tmp_path: Path) -> None:
    name = describe(kind).lists[0]
    (tmp_path / describe(kind).folder).mkdir()
    shutil.copy(Path(os.environ["BLEND_SPLITS"]) / name, tmp_path / describe(kind).folder / name)
    dataset = read_dataset(kind, tmp_path)
    base = set(split_base_new(range(len(dataset.names))).base)
    counts = (len(dataset.names), len(dataset.train), len(dataset.val), len(dataset.test))
    assert counts == PUBLISHED[kind]
    assert sum(r.label in base for r in dataset.test) == TEST_BASE[kind]
    assert min(Counter(r.label for r in dataset.train).values()) >= 16
    settings = {"data": {"kind": kind, "partition_seed": 1, "boost": 1.0}}
    manifest = deal(dataset, parse_experiment({"clients": 10, **settings}))
    assert [len(part.train) for part in manifest.clients] == IMAGES[kind]


def changed(tmp_path: Path, change: Any, kind: str = "dtd") -> str:
    """What a split file ends in after `change(content)`."""
    path = write_coop(tmp_path, kind)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))
    return refusal(kind, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("val") and None, "must have exactly the keys train, val and test"),
        (lambda c: c.update(extra=[]), "must have exactly the keys train, val and test"),
        (lambda c: [1], "must have exactly the keys"),
        (lambda c: c["val"].pop() and None, "1,127 val images, not 1,128"),
        (lambda c: c["train"][7].pop() and None, r"train\[7\] must be \[path, label, class name\]"),
        (lambda c: c["train"][0].__setitem__(1, "x"), r"train\[0\] must be"),
        (lambda c: c["train"][0].__setitem__(1, -1), r"train\[0\] must be"),
        (lambda c: c["train"][0].__setitem__(2, "other"), "label 0 is 'other' and 'class_000'"),
        (
            lambda c: c["test"][0].__setitem__(0, "../x.jpg"),
            r"path '../x.jpg' leads out",
        ),
        (lambda c: c["test"][0].__setitem__(0, "/etc/x.jpg"), "leads out of the data set"),
        (lambda c: c["test"].__setitem__(0, c["train"][0]), "is listed 2 times"),
        (
            lambda c: {p: [[f, n + (n > 4), w] for f, n, w in v] for p, v in c.items()},
            "labels are not 0 to 46: no image has label 5",
        ),
        (lambda c: {**c, "train": {}}, "train is no list"),
        (lambda c: c["train"][0].__setitem__(1, 10**400), "are damaged .OverflowError"),
        (lambda c: c["train"][0].__setitem__(1, "9" * 400), "are damaged .OverflowError"),
        (
            lambda c: {p: [[f, n, w + "\x1b" * (n == 3)] for f, n, w in v] for p, v in c.items()},
            "class name 'class_003.x1b' is empty or not printable",
        ),
    ],
)
def test_a_damaged_split_file_is_named_with_the_place(
    tmp_path: Path, change: Any, message: str
) -> None:
    import re

    assert re.search(message, changed(tmp_path, change))


def test_labels_written_as_texts_or_whole_floats_are_numbers(tmp_path: Path) -> None:
    path = write_coop(tmp_path, "dtd")
    content = json.loads(path.read_text())
    for entry, kind in zip(content["train"], (str, float), strict=False):
        entry[1] = kind(entry[1])
    path.write_text(json.dumps(content))
    assert read_dataset("dtd", tmp_path).train[0].label == 0


def test_a_missing_split_is_never_made_silently_but_the_command_is_named(tmp_path: Path) -> None:
    path = write_coop(tmp_path, "dtd")
    path.unlink()
    said = refusal("dtd", tmp_path)
    assert str(path) in said
    assert f"blend data make-split dtd --root {tmp_path}" in said
    assert not path.exists()
    path.write_text("{")
    assert "no readable JSON" in refusal("dtd", tmp_path)


def test_folders_are_named_as_they_must_be(tmp_path: Path) -> None:
    (tmp_path / "SUN397").mkdir()
    said = refusal("sun397", tmp_path)
    assert str(tmp_path / "sun397") in said
    assert "rename SUN397 there" in said
    assert "docs/data.md lists what belongs there" in refusal("dtd", tmp_path)
    with pytest.raises(ConfigError, match=r"data.root .*nowhere is not a folder"):
        read_dataset("dtd", tmp_path / "nowhere")


def test_aircraft_names_may_hold_blanks_and_slashes(tmp_path: Path) -> None:
    folder = write_fgvc(tmp_path)
    dataset = read_dataset("fgvc_aircraft", tmp_path)
    counts = (len(dataset.names), len(dataset.train), len(dataset.val), len(dataset.test))
    assert counts == PUBLISHED["fgvc_aircraft"]
    assert dataset.names[0] == "Model 0/B"
    assert dataset.train[0].path == "fgvc_aircraft/images/0000000.jpg"
    assert all(dataset.names[r.label] == r.class_name for r in dataset.test)
    lines = (folder / "images_variant_val.txt").read_text().splitlines()
    (folder / "images_variant_val.txt").write_text("\n".join(["0000001 Model 999", *lines[1:]]))
    assert "images_variant_val.txt line 1: 'Model 999' is not in variants.txt" in refusal(
        "fgvc_aircraft", tmp_path
    )


def test_imagenet_classes_may_share_a_name_but_not_a_label(tmp_path: Path, monkeypatch) -> None:
    counts = {"train": 12, "val": 0, "test": 8}
    patch_description(monkeypatch, "imagenet", classes=4, counts=counts)
    folder = write_imagenet(tmp_path, ["tench", "missile", "sun glasses", "missile"], 3, 2)
    dataset = read_dataset("imagenet", tmp_path)
    assert dataset.names == ("tench", "missile", "sun glasses", "missile")
    # Hidden files and those of a file manager are no images.
    assert {Path(r.path).suffix for r in (*dataset.train, *dataset.test)} == {".JPEG"}
    wnids = sorted(p.name for p in (folder / "images" / "val").iterdir())
    assert [r.path for r in dataset.test[:2]] == [
        f"imagenet/images/val/{wnids[0]}/{wnids[0]}_val_{i}.JPEG" for i in (0, 1)
    ]
    shutil.rmtree(folder / "images" / "val" / wnids[3])
    assert wnids[3] in refusal("imagenet", tmp_path)


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar_comes_from_its_python_archive(kind: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, kind)
    dataset = read_dataset(kind, tmp_path)
    assert (len(dataset.names), len(dataset.train), 0, len(dataset.test)) == PUBLISHED[kind]
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 3072), dtype=np.uint8)
    image = read_image(kind, tmp_path, dataset.test[1003])
    assert image.shape == (3, 32, 32)
    assert np.array_equal(image.numpy(), pixels[3].reshape(3, 32, 32))
    if kind == "cifar100":
        assert dataset.coarse == tuple(label % 20 for label in range(100))
        assert dataset.names[7] == "fine_7"
    (folder / "meta" if kind == "cifar100" else folder / "batches.meta").unlink()
    assert "is missing; docs/data.md" in refusal(kind, tmp_path)


@pytest.mark.parametrize(
    ("level", "label", "message"),
    [
        ("coarse", 20, "test: coarse_labels has 20, but there are names for 0 to 19 only"),
        ("coarse", -1, "test: coarse_labels has -1, but there are names for 0 to 19 only"),
        ("coarse", "3", "test: coarse_labels is no list of labels"),
        ("fine", 100, "test: fine_labels has 100, but there are names for 0 to 99 only"),
    ],
)
def test_a_cifar_label_without_a_name_is_named(
    tmp_path: Path, level: str, label: Any, message: str
) -> None:
    folder = write_cifar(tmp_path, "cifar100")
    content = load_restricted(folder / "test")
    content[f"{level}_labels"][7] = label
    (folder / "test").write_bytes(pickle.dumps(content, protocol=2))
    assert f"{folder}/{message}" in refusal("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("kind", "domains", "train", "test"),
    [
        ("domainnet10", 6, 18278, 4573),
        ("office_caltech10", 4, 2025, 508),
        ("pacs", 4, 8994, 997),
        ("office_home", 4, 12476, 3112),
        ("office31", 3, 3288, 822),
        ("domainnet345", 6, 345 * 6 - 1, 345 * 6),
    ],
)
def test_domain_sets_have_their_domains_and_classes(
    kind: str, domains: int, train: int, test: int, tmp_path: Path
) -> None:
    write_domains(tmp_path, kind)
    dataset = read_dataset(kind, tmp_path)
    assert dataset.domains == tuple(describe(kind).domains)
    assert len(dataset.domains) == domains
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    for record in (*dataset.train, *dataset.test):
        parts = Path(record.path).parts
        assert dataset.names[record.label] == parts[-2]
        assert record.domain == parts[-3]


def test_pacs_skips_the_broken_sketch_and_reads_no_test_list(tmp_path: Path) -> None:
    folder = write_domains(tmp_path, "pacs")
    for list_ in (folder / "label").glob("*_test_kfold.txt"):
        list_.unlink()
    assert not [r for r in read_dataset("pacs", tmp_path).train if "4068-1" in r.path]
    (folder / "label" / "photo_train_kfold.txt").write_text("photo/dog/1.jpg 2\n")
    assert "has the label of photo/elephant" in refusal("pacs", tmp_path)
    (folder / "label" / "photo_train_kfold.txt").write_text("photo/dog/1.jpg 8\n")
    assert "photo_train_kfold.txt line 1: label 8 is not 1 to 7" in refusal("pacs", tmp_path)


def test_archives_folders_that_must_be_renamed_are_named(tmp_path: Path) -> None:
    folder = write_domains(tmp_path, "office_home")
    (folder / "Real_World").rename(folder / "Real World")
    assert f"rename {folder / 'Real World'}" in refusal("office_home", tmp_path)
    folder = write_domains(tmp_path, "office31")
    inner = folder / "dslr" / "images"
    inner.mkdir()
    for entry in sorted((folder / "dslr").iterdir()):
        if entry != inner:
            entry.rename(inner / entry.name)
    assert "has an inner images/" in refusal("office31", tmp_path)


def test_a_class_that_one_domain_lacks_is_named(tmp_path: Path) -> None:
    folder = write_domains(tmp_path, "office31")
    shutil.rmtree(folder / "webcam" / "class_04")
    assert "webcam: its classes differ from those of amazon: class_04" in refusal(
        "office31", tmp_path
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (([1, 2], ["bike"]), "must be lists of texts"),
        ((["a/bike/1.jpg"], ["bike", "mug"]), "1 paths but 2 class names"),
        ((["office_caltech_10/amazon/x/1.jpg"], ["x"]), "'x' is none of the 10 classes"),
        ((["office_caltech_10/amazon/mug/1.jpg"], ["bike"]), "listed as 'bike' of amazon"),
        ((["office_caltech_10/dslr/bike/1.jpg"], ["bike"]), "listed as 'bike' of amazon"),
        ((["office_caltech_10/../../x.jpg"], ["bike"]), "leads out"),
        ((["other/amazon/bike/1.jpg"], ["bike"]), "does not begin with office_caltech_10/"),
        ({"a": 1}, "holds no pair"),
    ],
)
def test_a_damaged_list_of_fedbn_is_named(tmp_path: Path, content: Any, message: str) -> None:
    folder = write_domains(tmp_path, "office_caltech10")
    (folder / "amazon_train.pkl").write_bytes(pickle.dumps(content, protocol=2))
    said = refusal("office_caltech10", tmp_path)
    assert message in said
    assert "amazon_train.pkl" in said


def test_the_hash_of_a_data_set_changes_with_its_lists(tmp_path: Path) -> None:
    found: list[Dataset] = []
    for label in (0, 1):
        root = tmp_path / str(label)
        path = write_coop(root, "dtd")
        if label:
            content = json.loads(path.read_text())
            content["train"].reverse()
            path.write_text(json.dumps(content))
        found.append(read_dataset("dtd", root))
    assert found[0].sources != found[1].sources
    assert list(found[0].sources) == ["dtd/split_zhou_DescribableTextures.json"]


def test_a_hash_in_a_file_name_is_no_archive(tmp_path: Path) -> None:
    folder = write_domains(tmp_path, "office31", images=True)
    first = min((folder / "amazon" / "class_00").iterdir())
    first.rename(first.with_name("a#1.jpg"))
    dataset = read_dataset("office31", tmp_path)
    [record] = [r for r in (*dataset.train, *dataset.test) if "#" in r.path]
    assert read_image("office31", tmp_path, record).shape == (3, 40, 48)
    require_files(tmp_path, [record], "office31")
    (first.with_name("a#1.jpg")).unlink()
    with pytest.raises(SiteError, match="1 of 1 images are missing"):
        require_files(tmp_path, [record], "office31")


@pytest.mark.parametrize("key", ["label_names", "labels"])
def test_nested_lists_in_an_archive_are_refused_at_once(tmp_path: Path, key: str) -> None:
    folder = write_cifar(tmp_path, "cifar10")
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    file = "batches.meta" if key == "label_names" else "data_batch_1"
    (folder / file).write_bytes(pickle.dumps({key: nested}, protocol=2))
    assert file in refusal("cifar10", tmp_path)


def test_damage_of_any_sort_names_the_data_set(tmp_path: Path) -> None:
    folder = write_domains(tmp_path, "pacs")
    (folder / "label" / "sketch_train_kfold.txt").write_text("sketch/dog/x.png " + "9" * 5000)
    assert "pacs: files below" in refusal("pacs", tmp_path)
