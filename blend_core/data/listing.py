"""The image files of a folder of class folders, and nothing from outside the data directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from blend_core.data.images import is_image_name
from blend_core.data.vocabulary import check_names, composed, quoted
from blend_core.errors import SiteError

__all__ = ["class_files", "is_hidden", "require_inside"]

_log = logging.getLogger(__name__)


def is_hidden(name: str) -> bool:
    """Whether an entry is skipped: hidden ones, and what macOS leaves in archives."""
    return name.startswith(".") or name == "__MACOSX"


def require_inside(path: Path, root: Path) -> None:
    """Refuse a path that a symbolic link leads out of the data directory.

    Raises:
        SiteError: E05.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise SiteError(
            f"E05 {path}: a link that leaves the data directory {root}; copy the images into it"
        )


def class_files(folder: Path, root: Path) -> dict[str, list[Path]]:
    """List the images of every class: direct sub-folders are classes, however deep images lie.

    Args:
        folder: holds one folder per class, e.g. <root>/train.
        root: the data directory.

    Returns:
        Files by class name (the folder's, in composed form), classes and files sorted by code
        point. A class folder without images is left out, with a warning.

    Raises:
        SiteError: E01 unreadable, E03 images directly in `folder`, E05 a link that leads out of
            `root`, E09 or E12 class folders whose names read the same or are empty.
    """
    require_inside(folder, root)
    entries = [e for e in _entries(folder) if not is_hidden(e.name)]
    loose = sum(is_image_name(e.name) and not os.path.isdir(e) for e in entries)
    if loose:
        lie = "1 image lies" if loose == 1 else f"{loose} images lie"
        raise SiteError(f"E03 {folder}: {lie} directly in it; put each in a class folder")
    classes: list[tuple[str, list[Path]]] = []
    for entry in filter(os.path.isdir, entries):
        found = list(_walk(Path(entry.path), root, set()))
        files = [path for path in found if is_image_name(path.name)]
        if len(files) < len(found):
            others = {path.suffix for path in found if not is_image_name(path.name)}
            _log.warning("%s: ignored files that are no images: %s", entry.path, quoted(others))
        if files:
            classes.append((composed(entry.name), sorted(files, key=_order)))
        else:
            _log.warning("W01 %s: ignored, no images in it", entry.path)
    check_names([name for name, _ in classes], str(folder))
    return dict(sorted(classes))


def _order(path: Path) -> list[str]:
    return [composed(part) for part in path.parts]


def _walk(folder: Path, root: Path, visited: set[str]) -> Iterator[Path]:
    """All visible files below a folder; links may stay within `root`, even in circles."""
    require_inside(folder, root)
    real = os.path.realpath(folder)
    if real in visited:
        return
    visited.add(real)
    for entry in _entries(folder):
        path = Path(entry.path)
        if is_hidden(entry.name):
            continue
        if os.path.isdir(entry):  # Unlike the entry's own is_dir(), False for a link to itself.
            yield from _walk(path, root, visited)
        else:
            if entry.is_symlink():
                require_inside(path, root)
            yield path


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder, sorted, so that nothing depends on the order of the file system."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda e: composed(e.name))
    except OSError as error:
        raise SiteError(
            f"E01 {folder}: cannot be read: {error.strerror}; check its permissions"
        ) from None
