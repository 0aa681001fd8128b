"""What lies in a site's folder: its images by part, and whether any of it has changed."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blend_core.data.findings import Finding, error, has_errors, warning
from blend_core.data.images import is_image_name
from blend_core.data.listing import DEEPEST, SiteImage, class_images, is_hidden
from blend_core.data.site_manifest import MANIFEST, read_manifest

__all__ = ["SiteImages", "is_site", "list_site", "site_stamp"]


@dataclass(frozen=True)
class SiteImages:
    """A site's images, each part by class and path.

    Attributes:
        train: training images.
        test: test images.
        novel: images of classes never trained on, for tests.
    """

    train: tuple[SiteImage, ...] = ()
    test: tuple[SiteImage, ...] = ()
    novel: tuple[SiteImage, ...] = ()


def is_site(folder: Path) -> bool:
    """Whether a folder has train/, test/ or a manifest, so that it can be a site's."""
    return os.path.lexists(folder / MANIFEST) or any(
        os.path.isdir(folder / part) for part in ("train", "test")
    )


def list_site(data_dir: Path, findings: list[Finding]) -> SiteImages:
    """List a site's images: from `manifest.csv` if there is one, else from train/ and test/.

    novel/ is read in either case, since a manifest has no word for it.

    Args:
        data_dir: the site's folder.
        findings: receives E01 to E05, E08, E09 and W01.
    """
    try:
        os.scandir(data_dir).close()
    except (FileNotFoundError, NotADirectoryError):
        text = f"data directory {data_dir} not found; set data-dir"
        findings.append(error("E01", text))
        return SiteImages()
    except OSError as failure:
        text = f"data directory {data_dir} cannot be read: {failure.strerror}; check permissions"
        findings.append(error("E01", text))
        return SiteImages()
    folders = {p for p in ("train", "test", "novel") if os.path.isdir(data_dir / p)}
    if os.path.lexists(data_dir / MANIFEST):
        if folders & {"train", "test"}:
            text = f"{data_dir}: {MANIFEST} counts, class folders in train/ and test/ do not"
            findings.append(warning("", text))
        train, test = read_manifest(data_dir, findings)
        fix = f"list images in {MANIFEST}"
    elif folders & {"train", "test"}:
        train, test = (
            class_images(data_dir, part, findings) if part in folders else []
            for part in ("train", "test")
        )
        fix = "add images as train/<class>/*.jpg"
    else:
        text = f"expected train/<class>/, test/<class>/ or {MANIFEST} under {data_dir}"
        findings.append(error("E02", text))
        return SiteImages()
    novel = class_images(data_dir, "novel", findings) if "novel" in folders else []
    if not train and not test and not has_errors(findings):
        findings.append(error("E08", f"{data_dir}: no images in train or test; {fix}"))
    return SiteImages(tuple(train), tuple(test), tuple(novel))


def site_stamp(data_dir: Path) -> str:
    """A fingerprint that changes when anything that counts in a site's folder does.

    Names, sizes, inodes and times of change of all images, of classes.txt and of the manifest;
    nothing is opened but the manifest. Never fails: what is missing or unreadable is part of the
    stamp.

    Returns:
        64 hexadecimal digits.
    """
    lines = [_stamp(os.path.join(data_dir, name)) for name in (MANIFEST, "classes.txt")]
    listed = os.path.lexists(data_dir / MANIFEST)
    if listed:
        lines += [_stamp(os.path.join(data_dir, path)) for path in _listed(data_dir / MANIFEST)]
    for part in ("novel",) if listed else ("train", "test", "novel"):
        lines += map(_stamp, _images(os.path.join(data_dir, part), set()))
    text = "\n".join(sorted(lines))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _stamp(path: str) -> str:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return f"{path!r} missing"
    # Copies may keep the time of change that users see; the other two always tell.
    return f"{path!r} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _listed(manifest: Path) -> Iterator[str]:
    """First column of a manifest, however wrong the rest is; its own stamp covers the rest."""
    try:
        with open(manifest, encoding="utf-8-sig", errors="replace", newline="") as file:
            for row in csv.reader(file):
                if row:
                    yield row[0]
    except (OSError, csv.Error):
        return


def _images(folder: str, visited: set[tuple[int, int]], levels: int = DEEPEST) -> Iterator[str]:
    """Image files below a folder; of one that cannot be read or lies too deep, its own path."""
    if levels == 0:
        yield folder
        return
    try:
        identity = os.stat(folder)
        if (identity.st_dev, identity.st_ino) in visited:
            return
        visited.add((identity.st_dev, identity.st_ino))
        with os.scandir(folder) as found:
            entries = sorted(
                (entry for entry in found if not is_hidden(entry.name)), key=lambda e: e.name
            )
    except OSError:
        yield folder
        return
    for entry in entries:
        if os.path.isdir(entry):
            yield from _images(entry.path, visited, levels - 1)
        elif is_image_name(entry.name):
            yield entry.path
