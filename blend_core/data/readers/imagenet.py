"""ImageNet: folders of classes, and names for them (PROTOCOL 1.1)."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from blend_core.data.datasets import Description, file_sha256, folder_names, read_lines
from blend_core.data.images import is_image_name
from blend_core.data.records import Dataset, Record
from blend_core.errors import SiteError

__all__ = ["read"]


def read(description: Description, root: Path) -> Dataset:
    """List `images/train/<wnid>` and `images/val/<wnid>`; the validation images are the test set.

    Labels are positions of the sorted folders. Names come from `classnames.txt`, a line is
    `<wnid> <name>`; two classes may have the same name.

    Raises:
        SiteError: a folder or file is missing, or the folders of both parts differ.
    """
    folder = PurePosixPath(description.folder)
    listed = root / folder / description.lists[0]
    words: dict[str, str] = {}
    for line, text in enumerate(read_lines(listed, description.kind), start=1):
        wnid, _, name = text.partition(" ")
        if not name.strip() or wnid in words:
            raise SiteError(f"{listed} line {line}: expected a new <wnid>, a blank and its name")
        words[wnid] = name
    sources = {str(folder / description.lists[0]): file_sha256(listed)}
    parts: dict[str, tuple[Record, ...]] = {}
    wnids: list[str] = []
    for part, inner in (("train", "train"), ("test", "val")):
        place = folder / description.images / inner
        found = folder_names(root / place, folders=True)
        wnids = wnids or found
        if found != wnids:
            odd = sorted(set(found) ^ set(wnids))
            raise SiteError(f"{root / place}: its classes differ from train/: {', '.join(odd[:5])}")
        unknown = [wnid for wnid in found if wnid not in words]
        if unknown:
            raise SiteError(f"{root / place / unknown[0]}: {listed} has no name for it")
        files = [
            (label, wnid, name)
            for label, wnid in enumerate(wnids)
            for name in folder_names(root / place / wnid)
            if is_image_name(name)
        ]
        parts[part] = tuple(
            Record(f"{place}/{wnid}/{name}", label, words[wnid]) for label, wnid, name in files
        )
        text = "\n".join(record.path for record in parts[part])
        sources[str(place)] = hashlib.sha256(text.encode()).hexdigest()
    return Dataset(
        kind=description.kind,
        names=tuple(words[wnid] for wnid in wnids),
        val=(),
        sources=sources,
        train=parts["train"],
        test=parts["test"],
    )
