"""PACS in its published folds (PROTOCOL 1.3)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from blend_core.data.datasets import Description, file_sha256, labelled_lines
from blend_core.data.records import Dataset, Record, checked_path
from blend_core.errors import SiteError

__all__ = ["read"]

# Cannot be decoded.
BROKEN = "sketch/dog/n02103406_4068-1.png"


def read(description: Description, root: Path) -> Dataset:
    """Train on the fold `train`, test on `crossval`.

    The `test` list of the usual release is the whole domain, training images included, and is not
    read. Labels in the files count from 1.

    Raises:
        SiteError: a list is missing or has another form.
    """
    names = description.names or ()
    folder = PurePosixPath(description.folder)
    parts: dict[str, list[Record]] = {"train": [], "test": []}
    sources: dict[str, str] = {}
    for part, fold in (("train", "train"), ("test", "crossval")):
        for domain in description.domains:
            place = folder / "label" / f"{domain}_{fold}_kfold.txt"
            path = root / place
            for where, file, number in labelled_lines(path, description.kind):
                if file == BROKEN:
                    continue
                if not 1 <= number <= len(names):
                    raise SiteError(f"{where}: label {number} is not 1 to {len(names)}")
                image = folder / description.images / checked_path(file, where)
                name = names[number - 1]
                if image.parts[-3:-1] != (domain, name):
                    raise SiteError(f"{where}: {file} has the label of {domain}/{name}; restore it")
                parts[part].append(Record(str(image), number - 1, name, domain))
            sources[str(place)] = file_sha256(path)
    return Dataset(
        kind=description.kind,
        names=names,
        train=tuple(parts["train"]),
        val=(),
        test=tuple(parts["test"]),
        sources=sources,
    )
