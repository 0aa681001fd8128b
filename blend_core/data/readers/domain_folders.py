"""Office-Home and Office-31: folders of domains and classes, no lists (PROTOCOL 1.3)."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from blend_core.data.datasets import Description, folder_names
from blend_core.data.images import is_image_name
from blend_core.data.records import Dataset, Record
from blend_core.errors import SiteError

__all__ = ["read"]

# Of ten images in a row, the first eight are trained on.
TRAINED = 8


def read(description: Description, root: Path) -> Dataset:
    """List every domain's images sorted by class and file; item i trains if i mod 10 <= 7.

    Raises:
        SiteError: a domain is missing or its classes differ from the others'.
    """
    folder = PurePosixPath(description.folder)
    parts: dict[str, list[Record]] = {"train": [], "test": []}
    sources: dict[str, str] = {}
    names: list[str] = []
    for domain in description.domains:
        place = folder / domain
        found = _classes(root / place, domain)
        names = names or found
        if found != names:
            odd = sorted(set(found) ^ set(names))
            raise SiteError(
                f"{root / place}: its classes differ from those of {description.domains[0]}: "
                f"{', '.join(odd[:5])}; restore the folder"
            )
        listed = [
            (label, name, file)
            for label, name in enumerate(names)
            for file in folder_names(root / place / name)
            if is_image_name(file)
        ]
        for position, (label, name, file) in enumerate(listed):
            part = "train" if position % 10 < TRAINED else "test"
            parts[part].append(Record(f"{place}/{name}/{file}", label, name, domain))
        text = "\n".join(f"{name}/{file}" for _, name, file in listed)
        sources[str(place)] = hashlib.sha256(text.encode()).hexdigest()
    return Dataset(
        kind=description.kind,
        names=tuple(names),
        train=tuple(parts["train"]),
        val=(),
        test=tuple(parts["test"]),
        sources=sources,
    )


def _classes(folder: Path, domain: str) -> list[str]:
    if not folder.is_dir():
        spaced = folder.with_name(domain.replace("_", " "))
        hint = f"rename {spaced}" if spaced.is_dir() else "docs/data.md lists what belongs there"
        raise SiteError(f"{folder} is missing; {hint}")
    found = folder_names(folder, folders=True)
    if found == ["images"]:
        raise SiteError(f"{folder}: has an inner images/; move its classes up into {folder}")
    return found
