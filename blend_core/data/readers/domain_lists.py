"""The whole DomainNet: lists of path and label per domain (PROTOCOL 1.3)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from blend_core.data.datasets import Description, file_sha256, labelled_lines
from blend_core.data.records import Dataset, Record, checked_path
from blend_core.errors import SiteError

__all__ = ["read"]


def read(description: Description, root: Path) -> Dataset:
    """Read `<domain>_train.txt` and `<domain>_test.txt`; a line is a path, a blank and the label.

    A path is `<domain>/<class>/<file>`; the class's folder is its name. Some domains lack a class
    in one of the parts, which shifts nothing.

    Raises:
        SiteError: a list is missing or has another form, or a label has two names or none.
    """
    folder = PurePosixPath(description.folder)
    names: dict[int, str] = {}
    parts: dict[str, list[Record]] = {"train": [], "test": []}
    sources: dict[str, str] = {}
    for part, records in parts.items():
        for domain in description.domains:
            place = folder / f"{domain}_{part}.txt"
            path = root / place
            for where, file, label in labelled_lines(path, description.kind):
                pieces = PurePosixPath(checked_path(file, where)).parts
                if len(pieces) < 3 or pieces[0] != domain:
                    raise SiteError(f"{where}: expected {domain}/<class>/<file>, not {file!r}")
                if names.setdefault(label, pieces[1]) != pieces[1]:
                    raise SiteError(f"{where}: label {label} is {names[label]!r} and {pieces[1]!r}")
                records.append(Record(str(folder / file), label, pieces[1], domain))
            sources[str(place)] = file_sha256(path)
    missing = sorted(set(range(description.class_count)) - set(names))
    if missing:
        raise SiteError(f"{root / folder}: no image has label {missing[0]}; restore the lists")
    return Dataset(
        kind=description.kind,
        names=tuple(names[label] for label in sorted(names)),
        train=tuple(parts["train"]),
        val=(),
        test=tuple(parts["test"]),
        sources=sources,
    )
