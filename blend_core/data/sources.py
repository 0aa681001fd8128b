"""Which clients an experiment has, and where each one's images come from."""

from __future__ import annotations

import os
from pathlib import Path

from blend_core.config import COOP, DATASET_KINDS, Experiment
from blend_core.data.benchmark import dealt, load_benchmark, require_images
from blend_core.data.client_data import ClientData
from blend_core.data.datasets import describe, read_dataset
from blend_core.data.dealing import deal
from blend_core.data.folders import FolderOptions, load_folder
from blend_core.data.listing import is_hidden
from blend_core.data.manifest import Manifest
from blend_core.data.records import Dataset
from blend_core.data.shapes_benchmark import load_shapes, shapes_classes, shapes_dataset
from blend_core.data.site_images import is_site
from blend_core.data.store import GIB, ImageStore
from blend_core.data.transforms import Preprocess
from blend_core.errors import ConfigError, SiteError
from blend_core.names import checked_name, client_name

__all__ = [
    "class_names",
    "client_names",
    "dealt_data",
    "load_client_data",
    "prompt_template",
    "require_data",
]


def client_names(experiment: Experiment) -> list[str] | None:
    """Names of all clients, as far as the experiment alone decides them.

    Returns:
        shapes and data sets of the papers: client-00, client-01, ..., in order of their
        partitions. Folders with `data.root`: its site folders, sorted. Folders without: None, for
        every site brings its own.

    Raises:
        ConfigError: `data.root` is missing or holds no site, another number of sites than
            `clients`, or one whose name cannot be a client name.
    """
    if experiment.data.kind != "folders":
        return [client_name(index, experiment.clients) for index in range(experiment.clients)]
    if experiment.data.root is None:
        return None
    return _site_names(Path(experiment.data.root), experiment.clients)


def class_names(experiment: Experiment) -> tuple[str, ...]:
    """Class names that the experiment alone decides; none where every site brings its own.

    Of a data set of the papers, none either where this machine does not have it.
    """
    data = experiment.data
    if data.kind == "shapes":
        base, new = shapes_classes(experiment)
        return tuple(combination.name for combination in (*base, *new))
    if data.kind == "folders":
        return tuple(data.classes)
    if data.root is None or not os.path.isdir(os.path.join(data.root, describe(data.kind).folder)):
        return ()
    return read_dataset(data.kind, Path(data.root)).names


def prompt_template(experiment: Experiment) -> str:
    """The prompt of the experiment, with one {}; `coop` is the data set's own."""
    data = experiment.data
    return describe(data.kind).template if data.template == COOP else data.template


def dealt_data(experiment: Experiment) -> tuple[Dataset, Manifest]:
    """The images of an experiment and who gets them, as far as it decides that.

    Raises:
        ConfigError: every site brings its own folder, `data.root` is missing, or settings and
            data do not fit together.
        SiteError: files of the data set are missing or not the published ones.
    """
    if experiment.data.kind == "folders":
        raise ConfigError("data.kind = folders: every site has its own images, nothing is dealt")
    if experiment.data.kind == "shapes":
        dataset = shapes_dataset(experiment)
        return dataset, deal(dataset, experiment)
    return dealt(experiment, _root(experiment, None))


def require_data(experiment: Experiment) -> None:
    """Refuse an experiment on this machine of which images are missing.

    Sites' own folders are looked at when they join.

    Raises:
        ConfigError: `data.root` is missing, or settings and data do not fit together.
        SiteError: files are missing; names the first of them and where they belong.
    """
    if experiment.data.kind in DATASET_KINDS:
        require_images(experiment, _root(experiment, None))


def _root(experiment: Experiment, data_dir: Path | None) -> Path:
    """The folder that holds the data sets, on this machine."""
    data = experiment.data
    if data_dir is not None:
        return data_dir
    if data.root is None:
        raise ConfigError(
            f"data.kind = {data.kind} needs data.root, the folder that holds the data sets"
        )
    return Path(data.root)


def _site_names(root: Path, clients: int) -> list[str]:
    if not os.path.isdir(root):
        raise ConfigError(f"data.root {root} is not a folder; it must hold one folder per client")
    try:
        folders = sorted(
            e.name for e in root.iterdir() if os.path.isdir(e) and not is_hidden(e.name)
        )
    except OSError as error:
        raise ConfigError(f"data.root {root} cannot be read: {error.strerror}") from None
    names = [name for name in folders if is_site(root / name)]
    if not names:
        raise ConfigError(
            f"data.root {root} holds no site: no sub-folder with train/, test/ or manifest.csv"
        )
    for name in names:
        checked_name(f"data.root {root}: site folder", name)
    if len(names) != clients:
        others = ", ".join(n for n in folders if n not in names)
        note = (
            f" (without train/, test/ and manifest.csv, hence no sites: {others})" if others else ""
        )
        plural = "" if len(names) == 1 else "s"
        raise ConfigError(
            f"data.root {root} holds {len(names)} site{plural} but clients = {clients}; "
            f"set clients={len(names)}{note}"
        )
    return names


def load_client_data(
    experiment: Experiment,
    name: str,
    partition: int | None,
    data_dir: Path | None,
    options: FolderOptions,
    pre: Preprocess,
    image_memory: float,
) -> ClientData:
    """Load one client's images, labels and class names.

    Args:
        experiment: says which kind of data.
        name: the client's name.
        partition: shapes and data sets: the client's number; None: found by `name`. Folders: not
            used.
        data_dir: folders: the site's own folder; the server's `data.root` is never read here.
            Data sets: the folder that holds them on this machine; None: `data.root`.
        options: folders: how the site reads its folder.
        pre: the backbone's preprocessing.
        image_memory: GiB of decoded images that this process may keep in memory.

    Raises:
        ConfigError: the client, or what was said about it, does not fit the experiment.
        SiteError: the site's folder or the data set is unusable.
    """
    data = experiment.data
    if data.kind in DATASET_KINDS:
        number = _partition(experiment, name, partition)
        return load_benchmark(experiment, number, _root(experiment, data_dir), pre, image_memory)
    if data.kind == "shapes":
        if data_dir is not None:
            raise ConfigError(
                f"{name}: data-dir is given, but data.kind = shapes renders its images; "
                "set data.kind=folders or leave data-dir out"
            )
        return load_shapes(experiment, _partition(experiment, name, partition), pre)
    if options.label_space == "federation" and not data.classes:
        raise ConfigError(f"{name}: label-space federation needs data.classes, the class names")
    if data_dir is None:
        raise SiteError(f"E01 {name}: no data directory; set data-dir")
    return load_folder(data_dir, pre, options, ImageStore(int(image_memory * GIB)))


def _partition(experiment: Experiment, name: str, partition: int | None) -> int:
    if partition is not None:
        return partition
    names = client_names(experiment) or []
    if name not in names:
        raise ConfigError(
            f"{name}: not a client of this benchmark ({names[0]} to {names[-1]}); set partition-id"
        )
    return names.index(name)
