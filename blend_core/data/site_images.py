"""What lies in a site's folder: its images by part, and whether any of it has changed."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blend_core.data.findings import Finding, error, has_errors, warning
from blend_core.data.images import is_image_name
from blend_core.data.listing import (
    SiteImage,
    class_images,
    counts_as_image,
    files_below,
    is_hidden,
)
from blend_core.data.site_manifest import MANIFEST, read_manifest
from blend_core.data.vocabulary import CLASSES, quoted

__all__ = ["SiteImages", "is_site", "list_site", "site_stamp"]

_PARTS = ("train", "test", "novel")


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
        findings: receives E01 to E05, E08, E09, W01, W07 and W09.
    """
    try:
        with os.scandir(data_dir) as entries:
            names = sorted(e.name for e in entries if not is_hidden(e.name))
    except (FileNotFoundError, NotADirectoryError):
        text = f"data directory {data_dir} not found; set data-dir"
        if data_dir.is_file():
            text = f"{data_dir} is a file; give the folder that holds train/ or {MANIFEST}"
        findings.append(error("E01", text))
        return SiteImages()
    except OSError as failure:
        text = f"data directory {data_dir} cannot be read: {failure.strerror}; check permissions"
        findings.append(error("E01", text))
        return SiteImages()
    others = [name for name in names if os.path.isdir(data_dir / name) and name not in _PARTS]
    misnamed = _misnamed(data_dir, names)
    # Of whatever kind: a link that leads nowhere is an error, and no missing folder.
    folders = {part for part in _PARTS if os.path.lexists(data_dir / part)}
    if os.path.lexists(data_dir / MANIFEST):
        if folders & {"train", "test"}:
            text = f"{data_dir}: {MANIFEST} counts, class folders in train/ and test/ do not"
            findings.append(warning("W07", text))
        train, test = read_manifest(data_dir, findings)
        fix = f"list images in {MANIFEST}"
    elif folders & {"train", "test"}:
        train, test = (
            class_images(data_dir, part, findings) if part in folders else []
            for part in ("train", "test")
        )
        fix = "add images as train/<class>/*.jpg"
        if others:
            text = f"{data_dir}: not read: {quoted(others)}; only train/, test/ and novel/ are"
            findings.append(warning("W07", text))
    else:
        text = f"expected train/<class>/, test/<class>/ or {MANIFEST} under {data_dir}"
        findings.append(error("E02", text + (misnamed or _likely_layout(data_dir, others))))
        return SiteImages()
    if misnamed:
        findings.append(warning("W07", f"{data_dir}: a file is not read{misnamed}"))
    novel = class_images(data_dir, "novel", findings) if "novel" in folders else []
    if not train and not test and not has_errors(findings):
        findings.append(error("E08", f"{data_dir}: no images in train or test; {fix}"))
    return SiteImages(tuple(train), tuple(test), tuple(novel))


def _misnamed(data_dir: Path, names: Sequence[str]) -> str:
    """What to do with a file that was meant to be the manifest or the list of classes."""
    for right in (MANIFEST, CLASSES):
        stem = right.partition(".")[0]
        for name in names if right not in names else ():
            if name.casefold().partition(".")[0] == stem and os.path.isfile(data_dir / name):
                return f"; save {quoted([name])} as {right}"
    return ""


def _likely_layout(data_dir: Path, folders: Sequence[str]) -> str:
    """What to do with folders that are there instead of train/ and test/."""
    if not folders:
        return ""
    sites = [name for name in folders if is_site(data_dir / name)]
    if sites:
        return f"; name the folder of one site instead, such as {data_dir / sites[0]}"
    classes = [name for name in folders if _holds_images(data_dir / name)]
    if classes:
        return f"; move the class folders ({quoted(classes)}) into {data_dir}/train"
    return f"; there are only {quoted(folders)}: rename or move them"


def _holds_images(folder: Path) -> bool:
    try:
        return any(map(is_image_name, os.listdir(folder)))
    except OSError:
        return False


def site_stamp(data_dir: Path) -> str:
    """A fingerprint that changes when anything that counts in a site's folder does.

    Names, sizes, inodes and times of change of all images, of classes.txt and of the manifest;
    nothing is opened but the manifest. Never fails: what is missing or unreadable is part of the
    stamp.

    Returns:
        64 hexadecimal digits.
    """
    findings: list[Finding] = []
    real_root = os.path.realpath(data_dir)
    lines = [file_stamp(data_dir / name) for name in (MANIFEST, CLASSES)]
    listed = os.path.lexists(data_dir / MANIFEST)
    if listed:
        lines += [file_stamp(data_dir / path) for path in _listed(data_dir / MANIFEST)]
    for part in ("novel",) if listed else ("train", "test", "novel"):
        files = files_below(os.path.join(data_dir, part), real_root, findings)
        lines += [file_stamp(file) for file in files if counts_as_image(file)]
    text = "\n".join(sorted([*lines, *map(str, findings)]))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def file_stamp(path: str | Path) -> str:
    """A text that changes when a file does; never fails."""
    path = os.fspath(path)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return f"{path!r} missing"
    # Copies may keep the time of change that users see; the other two always tell.
    return f"{path!r} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _listed(manifest: Path) -> Iterator[str]:
    """First column of a manifest, however wrong the rest is; its own stamp covers the rest."""
    if not manifest.is_file():  # A pipe would keep us waiting.
        return
    try:
        with open(manifest, encoding="utf-8-sig", errors="replace", newline="") as file:
            for row in csv.reader(file):
                if row:
                    yield row[0]
    except (OSError, csv.Error):
        return
