"""DomainNet and Office-Caltech in the lists of FedBN (PROTOCOL 1.3)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from blend_core.data.datasets import Description, file_sha256, require_file
from blend_core.data.records import Dataset, Record, checked_path
from blend_core.data.unpickle import load_restricted
from blend_core.errors import SiteError

__all__ = ["read"]


def read(description: Description, root: Path) -> Dataset:
    """Read `<domain>_train.pkl` and `<domain>_test.pkl`: paths and class names side by side.

    Paths count from the root of all data sets. The label of a name is its place in the data set's
    own list, whichever classes a domain has.

    Raises:
        SiteError: a list is missing, refused, or not what it must be.
    """
    names = description.names or ()
    number = {name: label for label, name in enumerate(names)}
    sources: dict[str, str] = {}
    parts: dict[str, list[Record]] = {"train": [], "test": []}
    for part, records in parts.items():
        for domain in description.domains:
            place = PurePosixPath(description.folder, f"{domain}_{part}.pkl")
            path = require_file(root / place, description.kind)
            paths, words = _lists(load_restricted(path), path)
            for file, name in zip(paths, words, strict=True):
                checked_path(file, str(path))
                if not PurePosixPath(file).is_relative_to(description.folder):
                    raise SiteError(
                        f"{path}: {file} does not begin with {description.folder}/; restore it"
                    )
                if PurePosixPath(file).parts[-3:-1] != (domain, name):
                    raise SiteError(
                        f"{path}: {file} is listed as {name!r} of {domain}, where it does not "
                        "lie; restore the list"
                    )
                if name not in number:
                    raise SiteError(
                        f"{path}: {name!r} is none of the {len(names)} classes of "
                        f"{description.kind}"
                    )
                records.append(Record(file, number[name], name, domain))
            sources[str(place)] = file_sha256(path)
    return Dataset(
        kind=description.kind,
        names=names,
        train=tuple(parts["train"]),
        val=(),
        test=tuple(parts["test"]),
        sources=sources,
    )


def _lists(content: Any, path: Path) -> tuple[list[str], list[str]]:
    """Two lists of texts of one length."""
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise SiteError(f"{path}: holds no pair of paths and class names; restore it")
    lists = [v.tolist() if isinstance(v, np.ndarray) else v for v in content]
    for values in lists:
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise SiteError(f"{path}: paths and class names must be lists of texts; restore it")
    if len(lists[0]) != len(lists[1]):
        raise SiteError(
            f"{path}: {len(lists[0])} paths but {len(lists[1])} class names; restore it"
        )
    return lists[0], lists[1]
