"""Finds test images that are training images as well, by content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from blend_core.data.site_images import SiteImages

__all__ = ["repeated_images"]


def repeated_images(data_dir: Path, images: SiteImages) -> list[str]:
    """Paths of the test images whose bytes are those of a training image (W04).

    Args:
        data_dir: the site's folder.
        images: what lies in it. Files that cannot be read are passed over.
    """
    sizes: dict[int, list[str]] = {}
    for image in images.train:
        sizes.setdefault(_size(data_dir / image.path), []).append(image.path)
    digests: dict[int, set[bytes]] = {}
    repeated = []
    for image in images.test:
        size = _size(data_dir / image.path)
        if size <= 0 or size not in sizes:  # Most files need not be read.
            continue
        if size not in digests:
            digests[size] = {_digest(data_dir / path) for path in sizes[size]}
        digest = _digest(data_dir / image.path)
        if digest and digest in digests[size]:
            repeated.append(image.path)
    return repeated


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _digest(path: Path) -> bytes:
    """SHA-256 of a file; nothing if it cannot be read, which decoding will tell."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
