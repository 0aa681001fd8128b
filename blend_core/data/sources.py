"""Which clients an experiment has, and where each one's images come from."""

from __future__ import annotations

import os
from pathlib import Path

from blend_core.config import Experiment
from blend_core.data.client_data import ClientData
from blend_core.data.folders import load_folder
from blend_core.data.listing import is_hidden
from blend_core.data.shapes_benchmark import load_shapes, shapes_classes
from blend_core.data.transforms import Preprocess
from blend_core.errors import ConfigError, SiteError
from blend_core.names import checked_name, client_name

__all__ = ["class_names", "client_names", "load_client_data"]


def client_names(experiment: Experiment) -> list[str] | None:
    """Names of all clients, as far as the experiment alone decides them.

    Returns:
        shapes: client-00, client-01, ..., in order of their partitions. Folders with `data.root`:
        its site folders, sorted. Folders without: None, for every site brings its own.

    Raises:
        ConfigError: `data.root` is missing or holds no site, another number of sites than
            `clients`, or one whose name cannot be a client name.
    """
    if experiment.data.kind == "shapes":
        return [client_name(index, experiment.clients) for index in range(experiment.clients)]
    if experiment.data.root is None:
        return None
    return _site_names(Path(experiment.data.root), experiment.clients)


def class_names(experiment: Experiment) -> tuple[str, ...]:
    """Class names that the experiment alone decides; none where every site brings its own."""
    if experiment.data.kind == "shapes":
        base, new = shapes_classes(experiment)
        return tuple(combination.name for combination in (*base, *new))
    return tuple(experiment.data.classes)


def _site_names(root: Path, clients: int) -> list[str]:
    if not os.path.isdir(root):
        raise ConfigError(f"data.root {root} is not a folder; it must hold one folder per client")
    try:
        folders = sorted(
            e.name for e in root.iterdir() if os.path.isdir(e) and not is_hidden(e.name)
        )
    except OSError as error:
        raise ConfigError(f"data.root {root} cannot be read: {error.strerror}") from None
    names = [n for n in folders if any(os.path.isdir(root / n / p) for p in ("train", "test"))]
    if not names:
        raise ConfigError(f"data.root {root} holds no site: no sub-folder with train/ or test/")
    for name in names:
        checked_name(f"data.root {root}: site folder", name)
    if len(names) != clients:
        others = ", ".join(n for n in folders if n not in names)
        note = f" (without train/ and test/, hence no sites: {others})" if others else ""
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
    label_space: str | None,
    pre: Preprocess,
) -> ClientData:
    """Load one client's images, labels and class names.

    Args:
        experiment: says which kind of data.
        name: the client's name.
        partition: shapes: the client's number; None: found by `name`. Folders: not used.
        data_dir: folders: the site's own folder. The server's `data.root` is never read here.
        label_space: folders: the site's own choice, "node" or "federation"; None: as the
            experiment says.
        pre: the backbone's preprocessing.

    Raises:
        ConfigError: the client, or what was said about it, does not fit the experiment.
        SiteError: the site's folder is unusable; see `load_folder`.
    """
    data = experiment.data
    if data.kind == "shapes":
        if data_dir is not None:
            raise ConfigError(
                f"{name}: data-dir {data_dir} is given, but data.kind = shapes renders its images; "
                "set data.kind=folders or leave data-dir out"
            )
        return load_shapes(experiment, _partition(experiment, name, partition), pre)
    space = data.label_space if label_space is None else label_space
    if space not in ("node", "federation"):
        raise ConfigError(f"{name}: label-space = {space!r}: must be node or federation")
    if space == "federation" and not data.classes:
        raise ConfigError(f"{name}: label-space federation needs data.classes, the class names")
    if data_dir is None:
        raise SiteError(f"E01 {name}: no data directory; set data-dir")
    return load_folder(data_dir, pre, space, data.classes, data.template)


def _partition(experiment: Experiment, name: str, partition: int | None) -> int:
    if partition is not None:
        return partition
    names = client_names(experiment) or []
    if name not in names:
        raise ConfigError(
            f"{name}: not a client of this benchmark ({names[0]} to {names[-1]}); set partition-id"
        )
    return names.index(name)
