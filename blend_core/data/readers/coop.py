"""The CoOp family: one `split_zhou_*.json` per data set (PROTOCOL 1.1)."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from blend_core.data.datasets import Description, file_sha256
from blend_core.data.records import Dataset, Record, checked_path
from blend_core.errors import SiteError

__all__ = ["read"]

PARTS = ("train", "val", "test")


def read(description: Description, root: Path) -> Dataset:
    """Read a split file: `train`, `val` and `test`, lists of [path, label, class name].

    The order of the file is kept. Labels must be 0 .. C-1, with one name each.

    Raises:
        SiteError: the file is missing, no such split, or a path leads out of the data set.
    """
    place = PurePosixPath(description.folder, description.lists[0])
    path = root / place
    if path.exists() and not path.is_file():
        raise SiteError(f"{path}: is no file; put the split file there instead")
    if not path.is_file():
        raise SiteError(
            f"{description.kind}: {path} is missing; copy the published split file there, or make "
            f"one of your own: blend data make-split {description.kind} --root {root}"
        )
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise SiteError(f"{path}: no readable JSON; restore the published file") from None
    if not isinstance(content, dict) or set(content) != set(PARTS):
        raise SiteError(f"{path}: must have exactly the keys train, val and test")
    images = PurePosixPath(description.folder, description.images)
    names: dict[int, str] = {}
    parts: dict[str, tuple[Record, ...]] = {}
    for part in PARTS:
        parts[part] = tuple(
            _record(entry, f"{path}: {part}[{number}]", images, names)
            for number, entry in enumerate(_list(content[part], f"{path}: {part}"))
        )
    labels = sorted(names)
    if labels != list(range(len(labels))):
        gap = next(i for i in range(len(labels)) if labels[i] != i)
        raise SiteError(f"{path}: labels are not 0 to {len(labels) - 1}: no image has label {gap}")
    return Dataset(
        kind=description.kind,
        names=tuple(names[label] for label in labels),
        sources={str(place): file_sha256(path)},
        train=parts["train"],
        val=parts["val"],
        test=parts["test"],
        published=not _made_here(path),
    )


def _made_here(path: Path) -> bool:
    """Whether `blend data make-split` made the split file, as it notes beside it."""
    note = path.with_suffix(".made.json")
    if not note.is_file():
        return False
    try:
        made: Any = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        made = None
    if not isinstance(made, dict) or made.get("sha256") != file_sha256(path):
        raise SiteError(
            f"{path}: is not the split that {note.name} was made with; restore it, or remove "
            f"{note.name} if the split file is the published one"
        )
    return True


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise SiteError(f"{where} is no list; restore the published file")
    return value


def _record(entry: Any, where: str, images: PurePosixPath, names: dict[int, str]) -> Record:
    """One entry; `names` learns the name of each label."""
    if (
        not isinstance(entry, list)
        or len(entry) != 3
        or not isinstance(entry[0], str)
        # A label is cast to int (PROTOCOL 1.1): 3, 3.0 and "3" are one label.
        or not str(entry[1]).removesuffix(".0").isdecimal()
        or not isinstance(entry[2], str)
        or not entry[2].strip()
    ):
        raise SiteError(f"{where} must be [path, label, class name]; restore the published file")
    label = int(float(entry[1]))
    name = names.setdefault(label, entry[2])
    if name != entry[2]:
        raise SiteError(f"{where}: label {label} is {name!r} and {entry[2]!r}")
    return Record(str(images / checked_path(entry[0], where)), label, entry[2])
