"""FGVC-Aircraft: text files of variants and of numbered images (PROTOCOL 1.1)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from blend_core.data.datasets import Description, file_sha256, read_lines
from blend_core.data.records import Dataset, Record, checked_path
from blend_core.errors import SiteError

__all__ = ["read"]


def read(description: Description, root: Path) -> Dataset:
    """Read `variants.txt`, whose line numbers are the labels, and one list of images per part.

    A line of a list is the image's number, a blank, and the variant to the end of the line.

    Raises:
        SiteError: a file is missing, or a line is not like that.
    """
    folder = PurePosixPath(description.folder)
    variants, *lists = (root / folder / name for name in description.lists)
    names = tuple(read_lines(variants, description.kind))
    labels = {name: label for label, name in enumerate(names)}
    if len(labels) < len(names):
        raise SiteError(f"{variants}: a variant occurs twice; restore the file")
    parts: dict[str, tuple[Record, ...]] = {}
    for part, path in zip(("train", "val", "test"), lists, strict=True):
        records = []
        for line, text in enumerate(read_lines(path, description.kind), start=1):
            number, _, name = text.partition(" ")
            if name not in labels:
                raise SiteError(f"{path} line {line}: {name!r} is not in {variants.name}")
            where = f"{path} line {line}"
            image = folder / description.images / checked_path(f"{number}.jpg", where)
            records.append(Record(str(image), labels[name], name))
        parts[part] = tuple(records)
    return Dataset(
        kind=description.kind,
        names=names,
        sources={str(folder / p.name): file_sha256(p) for p in (variants, *lists)},
        train=parts["train"],
        val=parts["val"],
        test=parts["test"],
    )
