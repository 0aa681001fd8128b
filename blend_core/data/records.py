"""What a data set of the papers holds: one record per image, never parallel lists."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from blend_core.errors import SiteError

__all__ = ["OWN_SPLIT", "Dataset", "Record", "checked_path", "require_files"]

# What readers of numbers are told of a data set that is not `published`.
OWN_SPLIT = "a split of your own (blend data make-split)"
# So many files are named when some are missing.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Record:
    """One image.

    Attributes:
        path: of the file, relative to the root of all data sets, with "/". For CIFAR the batch
            file, "#" and the position in it.
        label: index into the data set's class names.
        class_name: `Dataset.names[label]`, as it was read with the image.
        domain: of domain sets; else None.
    """

    path: str
    label: int
    class_name: str
    domain: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A data set as its own files describe it, in their order (which the partitions depend on).

    Attributes:
        kind: its id, e.g. "oxford_pets".
        names: class names by label.
        train: training images.
        val: validation images; may be empty.
        test: test images.
        sources: SHA-256 of every file that says which images there are, by path relative to the
            root; of folders that were listed, the SHA-256 of the sorted list.
        coarse: CIFAR-100: the coarse label of every label.
        published: whether the lists are those that everybody has, not a split made here.

    Raises:
        SiteError: a name that is empty or not printable, a label without a name, a record whose
            class name is not that of its label, a path that occurs twice, or in train and in
            test.
    """

    kind: str
    names: tuple[str, ...]
    train: tuple[Record, ...]
    val: tuple[Record, ...]
    test: tuple[Record, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    coarse: tuple[int, ...] | None = None
    published: bool = True

    def __post_init__(self) -> None:
        for name in self.names:
            if not name.strip() or not name.isprintable():
                raise SiteError(f"{self.kind}: class name {name!r} is empty or not printable")
        for part in (self.train, self.val, self.test):
            for record in part:
                if not 0 <= record.label < len(self.names):
                    raise SiteError(
                        f"{self.kind}: {record.path} has label {record.label}; expected 0 to "
                        f"{len(self.names) - 1}"
                    )
                if record.class_name != self.names[record.label]:
                    raise SiteError(
                        f"{self.kind}: {record.path} is called {record.class_name!r}, but label "
                        f"{record.label} is {self.names[record.label]!r}"
                    )
        paths = Counter(r.path for part in (self.train, self.val, self.test) for r in part)
        path, times = paths.most_common(1)[0] if paths else ("", 0)
        if times > 1:
            raise SiteError(f"{self.kind}: {path} is listed {times} times; one image, one record")

    def __hash__(self) -> int:
        return hash((self.kind, tuple(sorted(self.sources.items()))))

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains in order of first appearance; empty if there are none."""
        return tuple(dict.fromkeys(r.domain for r in self.train if r.domain is not None))


def checked_path(path: str, where: str) -> str:
    """A path out of a file of a data set, refused if it leads out of the folder it counts from.

    Args:
        path: with "/".
        where: the file it was read in, for the message.

    Raises:
        SiteError: it is empty, absolute, or has a part "..".
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise SiteError(f"{where}: path {path!r} leads out of the data set; restore the file")
    return path


def _is_there(root: Path, path: str) -> bool:
    if os.path.isfile(root / path):
        return True
    archive, mark, _ = path.rpartition("#")
    return bool(mark) and os.path.isfile(root / archive)


def require_files(root: Path, records: Sequence[Record], kind: str) -> None:
    """Refuse a data set of which images are missing, before anything is trained.

    Args:
        root: the folder that holds the data sets.
        records: the images that will be read. Of those in an archive ("#"), the archive counts.
        kind: the data set's id, for the message.

    Raises:
        SiteError: says how many are missing, and where the first of them belong.
    """
    missing = [r.path for r in records if not _is_there(root, r.path)]
    if missing:
        shown = ", ".join(str(root / path) for path in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise SiteError(
            f"{kind}: {len(missing)} of {len(records)} images are missing: {shown}{more}; "
            "docs/data.md shows where they come from"
        )
