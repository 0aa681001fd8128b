"""The papers' data sets by their ids: description, reader, and counts that must be right."""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from blend_core.data.images import decode_image
from blend_core.data.records import Dataset, Record
from blend_core.errors import BlendError, ConfigError, SiteError, described, one_line

__all__ = [
    "Description",
    "describe",
    "file_sha256",
    "folder_names",
    "labelled_lines",
    "read_dataset",
    "read_image",
    "read_lines",
    "require_file",
    "stamp",
]


class Description(BaseModel):
    """One data set in `datasets.yaml`; the fields are explained at its top."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: str
    reader: str
    folder: str
    images: str = ""
    lists: list[str] = []
    classes: int | list[str]
    domains: list[str] = []
    counts: dict[str, int]
    broken: int = 0
    base_new: bool = False
    duplicate_names: bool = False
    checked: bool = True
    template: str

    @property
    def names(self) -> tuple[str, ...] | None:
        """Class names by label, where the definition fixes them."""
        return None if isinstance(self.classes, int) else tuple(self.classes)

    @property
    def class_count(self) -> int:
        """Number of classes."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)


@lru_cache(maxsize=1)
def descriptions() -> Mapping[str, Description]:
    """All data sets by id."""
    text = (resources.files("blend_core.data") / "datasets.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {kind: Description(kind=kind, **fields) for kind, fields in data.items()}


def describe(kind: str) -> Description:
    """The description of a data set. Raises `ConfigError` for an unknown id."""
    if kind not in descriptions():
        raise ConfigError(f"{kind!r} is no data set; known are {', '.join(descriptions())}")
    return descriptions()[kind]


# Size and times of a file or folder; None: it is not there.
Stamp = tuple[int, int, int] | None
# The data sets in use, each with the stamps of what it was read from.
_KEPT: dict[tuple[str, Path], tuple[dict[str, Stamp], Dataset]] = {}
_MOST_KEPT = 2
# Times that a data set is read while somebody goes on changing it.
_READINGS = 3
# Nanoseconds by which a file system's times may lag behind.
_TICK = 20_000_000


def stamp(path: Path) -> Stamp:
    """What changes when a file is edited or a name is added to a folder, however it is done."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_dataset(kind: str, root: Path) -> Dataset:
    """Read which images a data set has, with their labels, names and domains.

    Nothing is downloaded, created or decoded. Image files are not looked for here; see
    `require_files`. A process reads a data set once, and again when its lists or folders change.

    Args:
        kind: its id.
        root: the folder that holds the data sets.

    Raises:
        ConfigError: unknown id, or `root` is no folder.
        SiteError: a file is missing or not what it must be; names it and where it belongs.
    """
    kept = _KEPT.get((kind, root))
    if kept is not None and kept[0] == _stamps(root, kept[1]):
        return kept[1]
    # Which files count is known only afterwards; if one changed meanwhile, all is read again.
    for _ in range(_READINGS):
        began = time.time_ns() - _TICK
        dataset = _read(kind, root)
        stamps = _stamps(root, dataset)
        if all(found is None or found[2] < began for found in stamps.values()):
            break
    _KEPT.pop((kind, root), None)
    while len(_KEPT) >= _MOST_KEPT:
        del _KEPT[next(iter(_KEPT))]
    _KEPT[kind, root] = stamps, dataset
    return dataset


def _stamps(root: Path, dataset: Dataset) -> dict[str, Stamp]:
    """Of all lists and listed folders, the folders in these, and the folders that hold them."""
    found: dict[str, Stamp] = {}
    for source in dataset.sources:
        path = root / source
        found[source] = stamp(path)
        found[str(path.parent)] = stamp(path.parent)
        found[f"{source} made here"] = stamp(path.with_suffix(".made.json"))
        if path.is_dir():
            with os.scandir(path) as entries:
                found |= {e.path: stamp(Path(e.path)) for e in entries if e.is_dir()}
    return found


def _read(kind: str, root: Path) -> Dataset:
    description = describe(kind)
    if not os.path.isdir(root):  # Path.is_dir() raises where a name is too long.
        raise ConfigError(
            f"data.root {str(root)[:200]} is not a folder; it must hold the data sets"
        )
    if not os.path.isdir(root / description.folder):
        near = [p.name for p in root.iterdir() if p.name.lower() == description.folder.lower()]
        hint = f"; rename {near[0]} there" if near else "; docs/data.md lists what belongs there"
        raise SiteError(f"{kind}: no folder {root / description.folder}{hint}")
    reader = importlib.import_module(f"blend_core.data.readers.{description.reader}")
    try:
        dataset: Dataset = reader.read(description, root)
    except BlendError:
        raise
    except Exception as error:  # Damaged files end in errors of all sorts.
        raise SiteError(
            f"{kind}: files below {root / description.folder} are damaged "
            f"({one_line(described(error), 200)}); restore the published ones"
        ) from error
    _require_counts(dataset, description, root)
    return dataset


def require_file(path: Path, kind: str) -> Path:
    """The path, if there is such a file. Raises `SiteError` that names it otherwise."""
    if not path.is_file():
        raise SiteError(f"{kind}: {path} is missing; docs/data.md shows where it comes from")
    return path


def read_lines(path: Path, kind: str) -> list[str]:
    """Lines of a text file of a data set, without the last empty one.

    Raises:
        SiteError: it is missing or no UTF-8 text.
    """
    try:
        text = require_file(path, kind).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise SiteError(f"{kind}: {path} is no readable text; restore the file") from None
    return [line.rstrip("\r") for line in text.rstrip("\n").split("\n")] if text.strip() else []


def labelled_lines(path: Path, kind: str) -> Iterator[tuple[str, str, int]]:
    """Where it is, path and label of every line `path label` of a list.

    Raises:
        SiteError: the list is missing, or a line has another form.
    """
    for number, line in enumerate(read_lines(path, kind), start=1):
        where = f"{path} line {number}"
        file, _, label = line.rpartition(" ")
        if not file or not label.isdecimal():
            raise SiteError(f"{where}: expected a path, a blank and a label; restore the file")
        yield where, file, int(label)


def folder_names(folder: Path, folders: bool = False) -> list[str]:
    """Visible files of a folder, or its sub-folders, sorted by code point.

    Raises:
        SiteError: it is missing or cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            found = [
                e.name for e in entries if not e.name.startswith(".") and e.is_dir() == folders
            ]
    except OSError as error:
        raise SiteError(f"{folder}: {error.strerror}; docs/data.md lists it") from None
    return sorted(found)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_counts(dataset: Dataset, description: Description, root: Path) -> None:
    found = {part: len(getattr(dataset, part)) for part in ("train", "val", "test")}
    found["total"] = sum(found.values())
    wrong = {
        part: n
        for part, n in description.counts.items()
        if not n - description.broken <= found[part] <= n
    }
    if len(dataset.names) != description.class_count:
        raise SiteError(
            f"{dataset.kind}: {len(dataset.names)} classes, expected {description.class_count}; "
            f"restore {root / description.folder}"
        )
    if not description.duplicate_names and len(set(dataset.names)) < len(dataset.names):
        name, _ = Counter(dataset.names).most_common(1)[0]
        raise SiteError(f"{dataset.kind}: two classes are called {name!r}; restore the lists")
    if wrong:
        listed = ", ".join(f"{found[part]:,} {part} images, not {n:,}" for part, n in wrong.items())
        source = ", ".join(list(dataset.sources)[:3])
        doubt = "" if description.checked else " (as commonly stated; not counted by us)"
        raise SiteError(
            f"{dataset.kind}: {listed}{doubt}; {source} below {root} differ from the published "
            "ones; restore them"
        )


def read_image(kind: str, root: Path, record: Record) -> Tensor:
    """Decode one image as the papers' code does, without EXIF rotation: uint8, shape [3, H, W].

    Raises:
        SiteError: it is missing or cannot be read.
    """
    if describe(kind).reader == "cifar":
        from blend_core.data.readers import cifar

        return cifar.image(root, record)
    return decode_image(root / record.path, upright=False)
