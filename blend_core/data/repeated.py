"""Finds images that are the same file twice, by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

__all__ = ["file_digest", "file_size", "same_files"]

# Bytes at the end of a file that are compared before the whole.
_TAIL = 4096


class _HasPath(Protocol):
    @property
    def path(self) -> str: ...


Listed = TypeVar("Listed", bound=_HasPath)


def same_files(data_dir: Path, images: Iterable[Listed]) -> list[list[Listed]]:
    """Images whose files hold the same bytes, together.

    Args:
        data_dir: the folder that their paths count from.
        images: of any parts. Files that are empty or cannot be read are passed over.

    Returns:
        Groups of at least two images; the images in each are in the order given.
    """
    groups = [list(images)]
    # Cheap comparisons first, so that most files need not be read.
    for key in (file_size, _tail, file_digest):
        groups = [same for group in groups for same in _alike(data_dir, group, key)]
    return groups


def _alike(
    data_dir: Path, images: Iterable[Listed], key: Callable[[Path], int | bytes]
) -> list[list[Listed]]:
    found: dict[int | bytes, list[Listed]] = {}
    for image in images:
        found.setdefault(key(data_dir / image.path), []).append(image)
    return [same for value, same in found.items() if value and len(same) > 1]


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if it cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file; nothing if it cannot be read, which decoding will tell."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""


def _tail(path: Path) -> bytes:
    """The last bytes, in which pixels lie: files of one camera begin alike."""
    try:
        with open(path, "rb") as file:
            file.seek(-min(_TAIL, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return file.read()
    except OSError:
        return b""
