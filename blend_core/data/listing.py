"""The image files of a folder of class folders, and nothing from outside the data directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blend_core.data.findings import Finding, error, warning
from blend_core.data.images import is_image_name
from blend_core.data.vocabulary import quoted
from blend_core.names import composed

__all__ = [
    "SiteImage",
    "class_images",
    "classes_of",
    "counts_as_image",
    "files_below",
    "is_hidden",
    "is_inside",
]

# Folders in folders that are looked into below a class folder.
_DEEPEST = 50


@dataclass(frozen=True, slots=True)
class SiteImage:
    """One image of a site.

    Attributes:
        path: relative to the data directory, with "/".
        class_name: its class folder or its label in the manifest, composed (NFC).
        domain: as the manifest says; else None.
    """

    path: str
    class_name: str
    domain: str | None = None


def classes_of(images: Iterable[SiteImage]) -> tuple[str, ...]:
    """Their classes, sorted."""
    return tuple(sorted({image.class_name for image in images}))


def is_hidden(name: str) -> bool:
    """Whether an entry is skipped: hidden ones, and what macOS leaves in archives."""
    return name.startswith(".") or name == "__MACOSX"


def is_inside(path: str | Path, real_root: str, findings: list[Finding]) -> bool:
    """Whether no symbolic link leads a path out of the data directory; if one does, E05.

    Args:
        path: below the data directory.
        real_root: the data directory without links, from `os.path.realpath`.
        findings: receives E05.
    """
    real = os.path.realpath(path)
    if real == real_root or real.startswith(os.path.join(real_root, "")):
        return True
    findings.append(
        error("E05", f"{path}: a link that leaves the data directory; copy the images into it")
    )
    return False


def class_images(data_dir: Path, part: str, findings: list[Finding]) -> list[SiteImage]:
    """List the images of a part: its direct sub-folders are classes, however deep images lie.

    A link that leads nowhere counts as an image, which cannot be read: it stood for one or more.

    Args:
        data_dir: the site's folder.
        part: "train", "test" or "novel", an existing folder in it.
        findings: receives E01 (unreadable), E03 (images outside class folders), E05 (links out of
            the data directory), E09 (folders of one name), W01 (class folders without images), W09
            (files of kinds that are not read).

    Returns:
        Images by class and path, both sorted by code point after composition.
    """
    folder, real_root = data_dir / part, os.path.realpath(data_dir)
    if not is_inside(folder, real_root, findings):
        return []
    entries = _entries(folder, findings)
    files = [entry.path for entry in entries if not os.path.isdir(entry)]
    others = {path for path in files if not is_image_name(path)}
    lost = set(filter(_leads_nowhere, others))
    loose = len(files) - len(others)
    if loose:
        lie = "1 image lies" if loose == 1 else f"{loose} images lie"
        findings.append(error("E03", f"{folder}: {lie} directly in it; put each in a class folder"))
    _warn_of_others(folder, others - lost, findings)
    images: dict[str, list[SiteImage]] = {}
    for entry in entries:
        name = composed(entry.name)
        before = len(findings)
        if entry.path in lost:
            found = [entry.path] if is_inside(entry.path, real_root, findings) else []
        elif os.path.isdir(entry):
            found = list(files_below(entry.path, real_root, findings))
        else:
            continue
        files = [path for path in found if counts_as_image(path)]
        _warn_of_others(entry.path, set(found).difference(files), findings)
        if name in images and files:
            findings.append(
                error(
                    "E09",
                    f"{folder}: two folders are called {quoted([name])}, with differently encoded "
                    "accents; merge them",
                )
            )
        elif files:
            images[name] = [
                SiteImage(os.path.relpath(path, data_dir), name)
                for path in sorted(files, key=lambda path: composed(path).split("/"))
            ]
        elif len(findings) == before:
            findings.append(warning("W01", f"{entry.path}: ignored, no images in it"))
    return [image for name in sorted(images) for image in images[name]]


def counts_as_image(path: str) -> bool:
    """Whether a file is read, or is a link that leads nowhere and should have been."""
    return is_image_name(path) or _leads_nowhere(path)


def _leads_nowhere(path: str) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def _warn_of_others(place: str | Path, files: Iterable[str], findings: list[Finding]) -> None:
    """W09: files that are not read, by the end of their names."""
    kinds = Counter(os.path.splitext(file)[1].lower() for file in files)
    if kinds:
        counts = ", ".join(f"{n:,} {kind or 'without ending'}" for kind, n in sorted(kinds.items()))
        text = f"{place}: files that are not read: {counts}; convert images to PNG or JPEG"
        findings.append(warning("W09", text))


def files_below(folder: str, real_root: str, findings: list[Finding]) -> Iterator[str]:
    """All visible files below a folder; links may stay within the root, even in circles.

    Args:
        folder: below the data directory.
        real_root: as for `is_inside`.
        findings: receives E01, E03 (too many folders in folders) and E05.
    """
    yield from _walk(folder, real_root, set(), findings, _DEEPEST)


def _walk(
    folder: str, real_root: str, visited: set[str], findings: list[Finding], levels: int
) -> Iterator[str]:
    if levels == 0:
        text = f"{folder}: more than {_DEEPEST} folders deep; move the images up"
        findings.append(error("E03", text))
        return
    real = os.path.realpath(folder)
    if real in visited or not is_inside(folder, real_root, findings):
        return
    visited.add(real)
    for entry in _entries(folder, findings):
        if os.path.isdir(entry):  # Unlike the entry's own is_dir(), False for a link to itself.
            yield from _walk(entry.path, real_root, visited, findings, levels - 1)
        elif not entry.is_symlink() or is_inside(entry.path, real_root, findings):
            yield entry.path


def _entries(folder: str | Path, findings: list[Finding]) -> list[os.DirEntry[str]]:
    """Visible entries of a folder, sorted: nothing depends on the order of the file system."""
    try:
        with os.scandir(folder) as found:
            return sorted(
                (e for e in found if not is_hidden(e.name)), key=lambda e: composed(e.name)
            )
    except OSError as failure:
        text = f"{folder}: cannot be read: {failure.strerror}; check its permissions"
        findings.append(error("E01", text))
        return []
