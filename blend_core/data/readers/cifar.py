"""CIFAR-10 and CIFAR-100 from their python archives (PROTOCOL 1.2)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blend_core.data.datasets import Description, Stamp, file_sha256, require_file, stamp
from blend_core.data.records import Dataset, Record
from blend_core.data.unpickle import load_restricted
from blend_core.errors import SiteError, one_line

__all__ = ["image", "read"]

SIDE = 32


def read(description: Description, root: Path) -> Dataset:
    """Read the batches' labels and the names; pixels are read when they are asked for.

    A record's path is that of its batch, "#" and its position there.

    Raises:
        SiteError: a file is missing, refused or not what it must be.
    """
    fine = description.kind == "cifar100"
    place = PurePosixPath(description.folder, description.images)
    *batches, meta = description.lists
    for name in description.lists:
        require_file(root / place / name, description.kind)
    listed = _content(root / place / meta)
    names = _texts(listed, "fine_label_names" if fine else "label_names", root / place / meta)
    groups = _texts(listed, "coarse_label_names", root / place / meta) if fine else ()
    parts: dict[str, list[Record]] = {"train": [], "test": []}
    coarse: dict[int, int] = {}
    for name in batches:
        path = root / place / name
        content = _content(path)
        labels = _labels(content, "fine_labels" if fine else "labels", path, len(names))
        for number, label in enumerate(labels):
            record = Record(f"{place}/{name}#{number}", label, names[label])
            parts["test" if name.startswith("test") else "train"].append(record)
        if fine:
            found = _labels(content, "coarse_labels", path, len(groups))
            for label, group in zip(labels, found, strict=True):
                if coarse.setdefault(label, group) != group:
                    raise SiteError(f"{path}: {names[label]} has two coarse labels; restore it")
    return Dataset(
        kind=description.kind,
        names=names,
        train=tuple(parts["train"]),
        val=(),
        test=tuple(parts["test"]),
        sources={str(place / n): file_sha256(root / place / n) for n in description.lists},
        coarse=tuple(coarse[label] for label in range(len(names))) if fine else None,
    )


def image(root: Path, record: Record) -> Tensor:
    """The pixels of a record: uint8, shape [3, 32, 32].

    Raises:
        SiteError: the batch file is missing or not what it must be.
    """
    path, _, number = record.path.partition("#")
    pixels = _pixels(root / path, stamp(root / path))
    return torch.from_numpy(pixels[int(number)].reshape(3, SIDE, SIDE).copy())


# All batches of CIFAR-10, or both files of CIFAR-100: 180 MB.
@lru_cache(maxsize=6)
def _pixels(path: Path, edited: Stamp) -> npt.NDArray[np.uint8]:
    data = _content(path).get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise SiteError(f"{path}: data is no array of 3072 bytes per image; restore the file")
    return data


def _content(path: Path) -> dict[Any, Any]:
    content = load_restricted(path)
    if not isinstance(content, dict):
        raise SiteError(f"{path}: holds no dictionary; restore the file")
    # Keys are texts in some releases and bytes in others.
    return {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}


def _texts(content: dict[Any, Any], key: str, path: Path) -> tuple[str, ...]:
    values = content.get(key)
    if not isinstance(values, list) or not all(isinstance(v, str | bytes) for v in values):
        raise SiteError(f"{path}: {key} is no list of names; restore the file")
    return tuple(v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in values)


def _labels(content: dict[Any, Any], key: str, path: Path, names: int) -> list[int]:
    """Whole numbers, one for every row of `data`, each the position of one of the names."""
    values = content.get(key)
    if not isinstance(values, list) or not all(isinstance(v, int) for v in values):
        raise SiteError(f"{path}: {key} is no list of labels; restore the file")
    wrong = next((v for v in values if not 0 <= v < names), None)
    if wrong is not None:
        raise SiteError(
            f"{path}: {key} has {one_line(str(wrong), 20)}, but there are names for 0 to "
            f"{names - 1} only; restore the archive"
        )
    data = content.get("data")
    if not isinstance(data, np.ndarray) or len(data) != len(values):
        raise SiteError(f"{path}: {key} and data differ in length; restore the file")
    return values
