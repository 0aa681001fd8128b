"""Who gets which images of a data set, written down: the definition of "same data"."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blend_core.config import DataConfig, Experiment, Rule
from blend_core.data.records import Dataset
from blend_core.data.resolved import RULE_SETTINGS, resolved, seen_and_new
from blend_core.errors import ConfigError, one_line
from blend_core.state import write_json_atomic

__all__ = [
    "HELD",
    "Manifest",
    "Part",
    "class_counts",
    "read_manifest",
    "split_sha256",
    "test_items",
    "write_manifest",
]

# A client's test images are all those of its classes.
HELD = "held-classes"


@dataclass(frozen=True)
class Part:
    """What one client gets.

    Attributes:
        id: its number, from 0.
        domain: of domain sets dealt by domain; else None.
        train: positions in `Dataset.train`, in the order they were dealt.
        test: positions in `Dataset.test`; None: all test images of the client's classes.
        classes: labels of its training images, ascending.
    """

    id: int
    domain: str | None
    train: tuple[int, ...]
    test: tuple[int, ...] | None
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """A partition, whole (PROTOCOL 3).

    Attributes:
        dataset: the data set's id.
        split_sha256: of the files that say which images there are; see `split_sha256`.
        shots: training images per class in the federation; None: all.
        subset: "base" (the first half of the classes) or "all".
        rule: name of the partition rule.
        params: its parameters.
        fewshot_seed: which images were drawn.
        partition_seed: who got them.
        class_names: by label.
        clients: in the order of their numbers.
        versions: of Python and NumPy, which made it; NumPy may change its streams.
    """

    dataset: str
    split_sha256: str
    shots: int | None
    subset: str
    rule: str
    params: Mapping[str, Any]
    fewshot_seed: int
    partition_seed: int
    class_names: tuple[str, ...]
    clients: tuple[Part, ...]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """As it is written, with `format` 1."""
        fields = asdict(self)
        for client in fields["clients"]:
            if client["test"] is None:
                client["test"] = HELD
        return {"format": 1, **fields}

    def part(self, number: int) -> Part:
        """What a client gets. Raises `ConfigError` if there is no such client."""
        if not 0 <= number < len(self.clients):
            raise ConfigError(
                f"client {number} does not exist: clients = {len(self.clients)}, so partitions "
                f"are 0 to {len(self.clients) - 1}"
            )
        return self.clients[number]

    def how(self) -> dict[str, Any]:
        """How the images were dealt: what somebody must set to deal them again."""
        return {
            "shots": self.shots,
            "subset": self.subset,
            "rule": self.rule,
            "params": dict(self.params),
            "fewshot_seed": self.fewshot_seed,
            "partition_seed": self.partition_seed,
        }

    def sentence(self) -> str:
        """`how` for people, e.g. "dtd, base classes, 16 shots; dirichlet-preferred, alpha 0.01"."""
        shots = "all images" if self.shots is None else f"{self.shots} shots"
        seen = "all classes" if self.subset == "all" else "base classes"
        rule = ", ".join([self.rule, *(f"{name} {value}" for name, value in self.params.items())])
        return (
            f"{self.dataset}, {seen}, {shots}; {rule}; few-shot seed {self.fewshot_seed}, "
            f"partition seed {self.partition_seed}"
        )

    def sha256(self) -> str:
        """Of what defines the data: the same images for the same clients, whoever dealt them."""
        fields = self.to_json()
        kept = {k: fields[k] for k in ("dataset", "split_sha256", "subset", "clients")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def split_sha256(dataset: Dataset) -> str:
    """SHA-256 over the names and hashes of all files that say which images there are."""
    return hashlib.sha256(json.dumps(sorted(dataset.sources.items())).encode()).hexdigest()


def test_items(dataset: Dataset, part: Part) -> tuple[int, ...]:
    """Positions in `Dataset.test` of a client's own test images."""
    if part.test is not None:
        return part.test
    own = set(part.classes)
    return tuple(i for i, record in enumerate(dataset.test) if record.label in own)


def class_counts(manifest: Manifest, dataset: Dataset) -> npt.NDArray[np.int64]:
    """Training images of every client and class, shape [clients, classes]."""
    counts = np.zeros((len(manifest.clients), len(dataset.names)), dtype=np.int64)
    for part in manifest.clients:
        np.add.at(counts[part.id], [dataset.train[i].label for i in part.train], 1)
    return counts


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as JSON, whole or not at all. Raises `StateError`."""
    write_json_atomic(path, manifest.to_json())


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _PartFile(_Strict):
    id: int = Field(ge=0)
    domain: str | None
    train: list[int] = Field(min_length=1)
    test: list[int] | Literal["held-classes"]
    classes: list[int]


class _ManifestFile(_Strict):
    format: Literal[1]
    dataset: str
    split_sha256: str
    shots: int | None = Field(ge=1)
    subset: Literal["base", "all"]
    rule: Rule
    params: dict[str, int | float | str]
    fewshot_seed: int = Field(ge=0)
    partition_seed: int = Field(ge=0)
    class_names: list[str]
    clients: list[_PartFile]
    versions: dict[str, str]


def _require_agreement(where: str, file: _ManifestFile, data: DataConfig) -> None:
    """Settings that say how images are dealt decide nothing here, so they must not say otherwise.

    Raises:
        ConfigError: one that is set has another value than the one the manifest was made with.
    """
    made: dict[str, object] = {
        "shots": file.shots or 0,
        "partition": file.rule,
        "fewshot_seed": file.fewshot_seed,
        "partition_seed": file.partition_seed,
    }
    for names in RULE_SETTINGS.values():
        made |= {name: file.params.get(name, _default(name)) for name in names}
    for name, value in made.items():
        if getattr(data, name) not in (value, _default(name)):
            was = json.dumps(value)
            raise ConfigError(
                f"{where}: was made with {name} {was}, but data.{name} = {getattr(data, name)}; "
                f"set data.{name}={was}, or make another manifest"
            )


def _default(name: str) -> object:
    return DataConfig.model_fields[name].default


def read_manifest(path: Path, dataset: Dataset, experiment: Experiment) -> Manifest:
    """Read a manifest and check that it is a partition of this data set for this experiment.

    Raises:
        ConfigError: it is no manifest, of another data set or split, for another number of
            clients, or deals an image that does not exist or deals one twice.
    """
    where = f"data.manifest {path}"
    if os.path.exists(path) and not os.path.isfile(path):  # A pipe would keep us waiting.
        raise ConfigError(f"{where}: is no regular file; blend data partition makes one")
    try:
        file = _ManifestFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; blend data partition makes one") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(one_line(f"{where}: {place or 'file'}: {first['msg'].lower()}")) from None
    if file.dataset != dataset.kind:
        raise ConfigError(f"{where}: is of {file.dataset[:80]!r}, but data.kind = {dataset.kind}")
    if file.split_sha256 != split_sha256(dataset):
        raise ConfigError(
            f"{where}: was made from other lists of images than those in data.root "
            f"({', '.join(dataset.sources)}); restore them, or make a new manifest"
        )
    if tuple(file.class_names) != dataset.names:
        raise ConfigError(f"{where}: its class_names are not those of {dataset.kind}")
    if len(file.clients) != experiment.clients:
        raise ConfigError(
            f"{where}: is for {len(file.clients)} clients, but clients = {experiment.clients}; "
            f"set clients={len(file.clients)}"
        )
    if file.subset != resolved(experiment.data).subset:
        raise ConfigError(f"{where}: has subset {file.subset}; set data.subset={file.subset}")
    _require_agreement(where, file, experiment.data)
    seen = set(seen_and_new(dataset, experiment.data)[0])
    taken: set[int] = set()
    for number, part in enumerate(file.clients):
        own = f"{where}: client {number}"
        if part.id != number:
            raise ConfigError(f"{own} has another id; clients are listed in order, from 0")
        test = [] if isinstance(part.test, str) else part.test
        for name, items in (("train", part.train), ("test", test)):
            records = dataset.train if name == "train" else dataset.test
            if not all(0 <= i < len(records) for i in items):
                raise ConfigError(f"{own}: {name} has a position outside 0 to {len(records) - 1}")
            if len(set(items)) < len(items):
                raise ConfigError(f"{own}: {name} has an image twice")
            if any(records[i].label not in seen for i in items):
                raise ConfigError(f"{own}: {name} has an image of a class that is kept as new")
        if file.rule != "iid-overlapping" and taken & set(part.train):
            raise ConfigError(f"{own}: train has an image that another client has, too")
        taken |= set(part.train)
        if part.classes != sorted({dataset.train[i].label for i in part.train}):
            raise ConfigError(f"{own}: classes are not those of its training images")
        if part.domain not in (None, *{dataset.train[i].domain for i in part.train}):
            raise ConfigError(f"{own}: domain is not that of its training images")
    parts = [
        Part(
            id=part.id,
            domain=part.domain,
            train=tuple(part.train),
            test=None if isinstance(part.test, str) else tuple(part.test),
            classes=tuple(part.classes),
        )
        for part in file.clients
    ]
    fields = file.model_dump(exclude={"format", "clients", "class_names"})
    return Manifest(**fields, class_names=tuple(file.class_names), clients=tuple(parts))
