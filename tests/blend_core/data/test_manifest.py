"""From settings to a partition, and the file that makes it the same everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from blend_core.config import parse_experiment
from blend_core.data.dealing import deal
from blend_core.data.manifest import (
    Manifest,
    class_counts,
    read_manifest,
    test_items,
    write_manifest,
)
from blend_core.data.records import Dataset, Record
from blend_core.data.resolved import Resolved, resolved
from blend_core.errors import ConfigError

test_items.__test__ = False  # type: ignore[attr-defined]


def dataset(kind: str = "dtd", classes: int = 6, each: int = 20, **fields: Any) -> Dataset:
    names = tuple(f"class {k}" for k in range(classes))
    parts = {
        part: tuple(
            Record(f"{kind}/{names[k]}/{part}{i}.jpg", k, names[k], domain)
            for domain in fields.get("domains", [None])
            for k in range(classes)
            for i in (range(number) if domain is None else range(number * (domain == "a") + 2))
        )
        for part, number in (("train", each), ("test", 5))
    }
    if "domains" in fields:
        parts = {
            part: tuple(
                Record(f"{r.domain}/{r.path}", r.label, r.class_name, r.domain) for r in records
            )
            for part, records in parts.items()
        }
    return Dataset(
        kind, names, parts["train"], (), parts["test"], {"list": "ab"}, fields.get("coarse")
    )


def experiment(kind: str = "dtd", clients: int = 3, seed: int = 0, **data: Any):
    return parse_experiment({"seed": seed, "clients": clients, "data": {"kind": kind, **data}})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shapes", (16, "base", "dirichlet-preferred", {"alpha": 0.01, "boost": 1.0})),
        ("oxford_pets", (16, "base", "dirichlet-preferred", {"alpha": 0.01, "boost": 1.0})),
        ("cifar100", (None, "all", "dirichlet", {"alpha": 0.3})),
        ("office31", (None, "all", "domain-dirichlet", {"alpha": 0.5})),
    ],
)
def test_what_is_left_unset_follows_the_kind_of_data(kind: str, expected: Any) -> None:
    found = resolved(parse_experiment({"data": {"kind": kind}}).data)
    assert (found.shots, found.subset, found.rule, found.params) == expected


def test_settings_win_over_what_follows_from_the_kind() -> None:
    data = {"kind": "dtd", "shots": 0, "subset": "all", "partition": "dirichlet", "alpha": 2.0}
    found = resolved(parse_experiment({"data": data}).data)
    assert found == Resolved(None, "all", "dirichlet", {"alpha": 2.0})


def test_shots_come_before_base_classes_and_those_before_the_partition() -> None:
    source = dataset()
    manifest = deal(source, experiment(shots=4))
    labels = [source.train[i].label for part in manifest.clients for i in part.train]
    # 4 of every class in the whole federation, of classes 0 to 2 only.
    assert sorted(labels) == sorted([0, 1, 2] * 4)
    # The draw of a class does not depend on which classes are kept.
    every = deal(source, experiment(shots=4, subset="all"))
    chosen = {i for part in every.clients for i in part.train if source.train[i].label < 3}
    assert chosen == {i for part in manifest.clients for i in part.train}


def test_three_seeds_three_things() -> None:
    source = dataset()

    def images(**data: Any) -> set[int]:
        parts = deal(source, experiment(shots=4, **data)).clients
        return {i for part in parts for i in part.train}

    def owners(**data: Any) -> list[set[int]]:
        return [set(part.train) for part in deal(source, experiment(shots=4, **data)).clients]

    fixed = {"fewshot_seed": 5, "partition_seed": 6}
    assert owners(**fixed, alpha=1.0) == owners(**fixed, alpha=1.0)
    assert images(**{**fixed, "partition_seed": 7}) == images(**fixed)
    assert owners(**{**fixed, "partition_seed": 7}, alpha=1.0) != owners(**fixed, alpha=1.0)
    assert images(**{**fixed, "fewshot_seed": 0}) != images(**fixed)


def test_test_images_are_those_of_the_classes_a_client_holds() -> None:
    source = dataset()
    manifest = deal(source, experiment(partition="disjoint"))
    for part in manifest.clients:
        tested = [source.test[i] for i in test_items(source, part)]
        assert {r.label for r in tested} == set(part.classes)
        assert len(tested) == 5 * len(part.classes)
    counts = class_counts(manifest, source)
    assert counts.shape == (3, 6)
    assert counts.sum(0).tolist() == [16, 16, 16, 0, 0, 0]


def test_domains_belong_to_clients() -> None:
    source = dataset("office31", domains=["a", "b"], each=30)
    manifest = deal(source, experiment("office31", clients=4, alpha=100.0))
    assert [part.domain for part in manifest.clients] == ["a", "a", "b", "b"]
    for part in manifest.clients:
        assert {source.train[i].domain for i in part.train} == {part.domain}
        assert part.test is not None
        assert {source.test[i].domain for i in part.test} == {part.domain}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"partition": "pachinko"}, "pachinko: needs coarse labels"),
        ({"partition": "coarse-label"}, "coarse-label: needs coarse labels"),
        ({"partition": "domain-dirichlet"}, "dtd has no domains"),
        ({"partition": "iid-overlapping", "shots": 0}, "set data.shots"),
        ({"partition": "disjoint", "clients": 4}, "3 classes leave client 3 of 4 without one"),
        ({"clients": 60}, "clients = 60: client .. gets no training image"),
    ],
)
def test_a_rule_that_does_not_fit_is_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deal(dataset(), experiment(**data))


def written(tmp_path: Path, change: dict[str, Any] | None = None, **settings: Any) -> Path:
    path = tmp_path / "manifest.json"
    write_manifest(path, deal(dataset(), experiment(**settings)))
    if change is not None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return path


def clients_of(tmp_path: Path) -> list[dict[str, Any]]:
    clients: list[dict[str, Any]] = json.loads(written(tmp_path).read_text())["clients"]
    return clients


def read(path: Path, **settings: Any) -> Manifest:
    return read_manifest(path, dataset(), experiment(**settings))


def test_a_manifest_comes_back_as_it_was_and_defines_the_data(tmp_path: Path) -> None:
    dealt = deal(dataset(), experiment())
    assert read(written(tmp_path)) == dealt
    # Whatever the run's seed would deal now, the manifest stands.
    assert read(written(tmp_path), seed=9) == dealt
    assert read(written(tmp_path)).sha256() == dealt.sha256()
    assert deal(dataset(), experiment(seed=1)).sha256() != dealt.sha256()
    assert Manifest(**{**vars(dealt), "versions": {"numpy": "9"}}).sha256() == dealt.sha256()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shots": 3}, r"with shots 16, but data.shots = 3; set data.shots=16"),
        ({"partition": "disjoint"}, 'set data.partition="dirichlet-preferred"'),
        ({"alpha": 3.0}, r"set data.alpha=0.01"),
        ({"blocks": "round"}, 'set data.blocks="balanced"'),
        ({"classes_per_client": 2}, r"set data.classes_per_client=null"),
        ({"partition_seed": 5}, r"set data.partition_seed=0"),
    ],
)
def test_settings_that_contradict_the_manifest_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": "round"}, "partition dirichlet-preferred does not read it, only disjoint does"),
        ({"partition": "disjoint", "alpha": 0.5}, "partition disjoint does not read it, only dir"),
        ({"boost": 2.0, "partition": "iid"}, "only dirichlet-preferred does"),
    ],
)
def test_settings_of_another_rule_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deal(dataset(), experiment(**settings))


def test_own_test_images_come_back_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"partition": "iid", "shots": 0}
    path = written(tmp_path, **settings)
    assert read(path, **settings) == deal(dataset(), experiment(**settings))
    assert read(path, **settings).clients[0].test


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format: input should be 1"),
        ({"dataset": "eurosat"}, r"is of 'eurosat', but data.kind = dtd"),
        ({"class_names": ["a"] * 6}, "class_names are not those of dtd"),
        ({"rule": "by hand"}, "rule: input should be"),
        ({"params": {"alpha": float("nan")}}, r": params\.alpha\.int: input should be"),
        ({"fewshot_seed": -1}, "fewshot_seed: input should be greater"),
        ({"split_sha256": "00"}, r"other lists of images .*\(list\)"),
        ({"subset": "all"}, "set data.subset=all"),
        ({"clients": []}, "is for 0 clients, but clients = 3"),
        ({"more": 1}, "more: extra inputs are not permitted"),
        ({"fewshot_seed": True}, "fewshot_seed: input should be a valid integer"),
        ({"fewshot_seed": "1"}, "fewshot_seed: input should be a valid integer"),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(written(tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", 2, "client 1 has another id"),
        ("domain", "sketch", "domain is not that of its training images"),
        ("train", [0, 500], "client 1: train has a position outside 0 to 119"),
        ("train", [-1], "outside"),
        ("train", [3, 3], "train has an image twice"),
        ("train", [119], "class that is kept as new"),
        ("train", [], r"clients\.1\.train: list should have at least 1 item"),
        ("test", [29], "class that is kept as new"),
        ("test", "all", r"clients\.1\.test\.list\[int\]: input should be a valid array"),
        ("classes", [0], "classes are not those of its training images"),
    ],
)
def test_a_damaged_client_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    clients = clients_of(tmp_path)
    clients[1][field] = value
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, {"clients": clients}))


def test_an_image_of_two_clients_is_refused(tmp_path: Path) -> None:
    clients = clients_of(tmp_path)
    clients[2] = {**clients[0], "id": 2}
    with pytest.raises(ConfigError, match="client 2: train has an image that another client has"):
        read(written(tmp_path, {"clients": clients}))


def test_no_manifest_and_no_json_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'no'}: No such file")):
        read(tmp_path / "no")
    (tmp_path / "text").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match=r"data.manifest"):
        read(tmp_path / "text")
