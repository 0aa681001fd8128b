"""A client's part of a data set of the papers: records, partition and decoded images together.

Clients of one process share what has been read, dealt and decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from blend_core.config import DataConfig, Experiment, parse_experiment
from blend_core.data.client_data import ClientData, Labelled, Origin
from blend_core.data.datasets import Stamp, describe, read_dataset, read_image, stamp
from blend_core.data.dealing import deal
from blend_core.data.manifest import Manifest, Part, read_manifest
from blend_core.data.records import Dataset, Record, require_files
from blend_core.data.repeated import same_files
from blend_core.data.resolved import seen_and_new
from blend_core.data.store import GIB, ImageStore, StoredImages, load_images
from blend_core.data.transforms import Preprocess, cifar_preprocess, limit_size, prepare_test

__all__ = ["dealt", "load_benchmark", "require_images", "shared_images"]

# Training, test and new-class records of one client.
Groups = tuple[list[Record], list[Record], list[Record]]


def dealt(experiment: Experiment, root: Path) -> tuple[Dataset, Manifest]:
    """The data set and its partition: that of `data.manifest`, or dealt by the settings.

    Args:
        experiment: with a data set of the papers as `data.kind`.
        root: the folder that holds the data sets.

    Raises:
        ConfigError: settings, data set and manifest do not fit together.
        SiteError: files of the data set are missing or not the published ones.
    """
    dataset = read_dataset(experiment.data.kind, root)
    return dataset, _manifest(_needed(experiment), dataset, _edited(experiment))


def _edited(experiment: Experiment) -> Stamp:
    path = experiment.data.manifest
    return None if path is None else stamp(Path(path))


def _needed(experiment: Experiment) -> str:
    """Key of a partition: all settings of the data, and the two seeds by their values.

    Neither the run's own seed nor the method is in it, so runs of a sweep share what they can.
    """
    data = experiment.data.model_dump(mode="json")
    seeds = {"fewshot_seed": experiment.fewshot_seed, "partition_seed": experiment.partition_seed}
    if data["manifest"] is not None:
        seeds = {}  # It has its own; only those that the user set must agree.
    needed = {"clients": experiment.clients, "data": {**data, **seeds}}
    return parse_experiment(needed).model_dump_json(by_alias=True)


@lru_cache(maxsize=4)
def _manifest(settings: str, dataset: Dataset, edited: Stamp) -> Manifest:
    """The partition. `edited` is of the file `data.manifest`: another one is read anew."""
    experiment = Experiment.model_validate_json(settings)
    if experiment.data.manifest is None:
        return deal(dataset, experiment)
    return read_manifest(Path(experiment.data.manifest), dataset, experiment)


def require_images(experiment: Experiment, root: Path) -> None:
    """Refuse a data set of which an image is missing that any client of the experiment reads.

    Raises:
        SiteError: says how many are missing, and where the first of them belong.
    """
    dataset = read_dataset(experiment.data.kind, root)
    _require_images(_needed(experiment), dataset, root, _edited(experiment))


@lru_cache(maxsize=16)
def _require_images(settings: str, dataset: Dataset, root: Path, edited: Stamp) -> None:
    manifest = _manifest(settings, dataset, edited)
    data = Experiment.model_validate_json(settings).data
    records = {
        record: None
        for part in manifest.clients
        for group in _groups(dataset, part, data)
        for record in group
    }
    require_files(root, list(records), dataset.kind)


def shared_images(dataset: Dataset, root: Path) -> list[tuple[Record, Record]]:
    """Training and test images that are the same file (PROTOCOL 8, P7), first of each first.

    Returns:
        One pair per test image that is a training image, too; empty where images lie in archives.
    """
    train = set(dataset.train)
    pairs = []
    for group in same_files(root, [*dataset.train, *dataset.test]):
        if group[0] in train:
            pairs += [(group[0], record) for record in group if record not in train]
    return pairs


def load_benchmark(
    experiment: Experiment, client_index: int, root: Path, pre: Preprocess, image_memory: float
) -> ClientData:
    """Read one client's images.

    Where a client's test images are those of its classes (PROTOCOL 3a, 3b), Base counts all test
    images of the classes that anybody trains on, and Novel all those of the others. Where it has
    test images of its own (3c to 3e), they are both Local and Base.

    Args:
        experiment: with a data set of the papers as `data.kind`.
        client_index: 0 .. `experiment.clients` - 1.
        root: the folder that holds the data sets.
        pre: the backbone's preprocessing.
        image_memory: GiB of decoded images that this process may keep in memory.

    Raises:
        ConfigError: there is no such client, or the settings do not fit the data set.
        SiteError: images are missing or cannot be read.
    """
    data = experiment.data
    dataset, manifest = dealt(experiment, root)
    part = manifest.part(client_index)
    groups = _groups(dataset, part, data)
    require_files(root, [record for group in groups for record in group], data.kind)
    small = describe(data.kind).reader == "cifar"
    own = cifar_preprocess(data.kind, pre, data.cifar_stats) if small else None
    # CIFAR's images are enlarged, so what is kept of the others for crops would be less.
    train = _decoded(dataset, root, own or pre, small, image_memory)
    test = _decoded(dataset, root, own or pre, True, image_memory)
    seen, new = seen_and_new(dataset, data)
    return ClientData(
        base_names=tuple(dataset.names[label] for label in seen),
        new_names=tuple(dataset.names[label] for label in new),
        train=_labelled(train, groups[0], seen),
        test_base=_labelled(test, groups[1], seen),
        test_new=_labelled(test, groups[2], new),
        local=None if part.test is None else frozenset(range(len(seen))),
        preprocess=own,
        origin=Origin(manifest.sha256(), part.domain, dataset.published),
    )


def _groups(dataset: Dataset, part: Part, data: DataConfig) -> Groups:
    """Records that a client trains on, is tested on, and is tested on as new classes."""
    seen, new = map(set, seen_and_new(dataset, data))
    train = [dataset.train[i] for i in part.train]
    if part.test is None:
        base = [record for record in dataset.test if record.label in seen]
    else:
        base = [dataset.test[i] for i in part.test]
    novel = [record for record in dataset.test if record.label in new]
    most = data.max_test_per_class
    return train, _first(base, most), _first(novel, most)


def _first(records: Sequence[Record], most: int | None) -> list[Record]:
    """The first `most` records of every class, in their order; all if None."""
    if most is None:
        return list(records)
    seen: dict[int, int] = {}
    kept = []
    for record in records:
        seen[record.label] = seen.get(record.label, 0) + 1
        if seen[record.label] <= most:
            kept.append(record)
    return kept


def _labelled(images: _Decoded, records: Sequence[Record], labels: Sequence[int]) -> Labelled:
    number = {label: position for position, label in enumerate(labels)}
    return Labelled.of(images.of(records), [number[record.label] for record in records])


class _Decoded:
    """Images of a data set that this process has decoded, prepared in one way."""

    def __init__(self, prepare: Callable[[Record], Tensor], image_memory: float) -> None:
        self._prepare = prepare
        self._store = ImageStore(int(image_memory * GIB))
        self._keys: dict[str, int] = {}

    def of(self, records: Sequence[Record]) -> StoredImages:
        """Images of some records; those that are not there yet are decoded.

        Raises:
            SiteError: an image cannot be read; the first is named.
        """
        missing = list({r.path: r for r in records if r.path not in self._keys}.values())
        images, bad = load_images(missing, self._prepare, self._store)
        failed = {position for position, _ in bad}
        read = (record for position, record in enumerate(missing) if position not in failed)
        self._keys |= {r.path: key for r, key in zip(read, images.keys, strict=True)}
        if bad:
            raise bad[0][1]
        return StoredImages(self._store, [self._keys[r.path] for r in records])


# One data set is in use at a time: training and test images each have a place.
@lru_cache(maxsize=2)
def _decoded(
    dataset: Dataset, root: Path, pre: Preprocess, whole: bool, image_memory: float
) -> _Decoded:
    fit = prepare_test if whole else limit_size
    return _Decoded(lambda record: fit(read_image(dataset.kind, root, record), pre), image_memory)
