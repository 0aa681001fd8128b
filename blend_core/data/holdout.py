"""A test part for sites without test images, which stays the same over all rounds."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from blend_core.data.listing import SiteImage, classes_of
from blend_core.data.repeated import file_digest, file_size
from blend_core.data.site_images import SiteImages
from blend_core.errors import SiteError
from blend_core.randomness import derive_seed
from blend_core.state import lock_file, make_folder, write_json_atomic

__all__ = [
    "LEAST",
    "Held",
    "apply_holdout",
    "hold_out",
    "holdout_lock",
    "read_holdout",
    "write_holdout",
]

LEAST = 5
"""Classes with fewer images keep all of them for training (PROTOCOL 7.2)."""

# Seconds to wait for another run at the same site, which decodes the same images.
_PATIENCE = 600.0


@dataclass(frozen=True)
class Held:
    """What is held out, by name and by content: a file that moves is still the same image.

    Attributes:
        classes: paths that are held out, by class; no paths where a class was too small.
        files: SHA-256 (hexadecimal) and size in bytes of each held-out file.
    """

    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def apply_holdout(
    data_dir: Path, images: SiteImages, share: float, file: Path | None
) -> tuple[SiteImages, Held | None]:
    """Move what is held out from train to test; nothing is written.

    What was held out before always is, whatever the share has become, although test images came
    later, and under whatever name its file now lies: otherwise it would be trained on. New classes
    are drawn only where a share is asked for and there are no test images.

    Args:
        data_dir: the site's folder.
        images: what lies in it.
        share: as for `hold_out`, or 0.
        file: earlier choices; None: there are none.

    Returns:
        The images, and what is to be remembered; None: nothing new.

    Raises:
        SiteError: as `read_holdout`.
    """
    known = Held() if file is None else read_holdout(file)
    choices = {name: list(paths) for name, paths in known.classes.items()}
    # Under other names first, so that a class that was renamed is not drawn again.
    _add_same(data_dir, images.train, known.files, choices)
    draws = share > 0 and not images.test
    new = [] if draws else [n for n in classes_of(images.train) if n not in choices]
    choices |= {name: [] for name in new}
    _, test, choices = hold_out(images.train, share, choices)
    files = dict(known.files) | _files(data_dir, test)
    # Copies of what was just drawn.
    _add_same(data_dir, images.train, files, choices)
    train, test, choices = hold_out(images.train, share, choices)
    moved = replace(images, train=train, test=(*images.test, *test))
    held = Held({name: paths for name, paths in choices.items() if name not in new or paths}, files)
    return moved, None if held == known else held


def _files(data_dir: Path, images: Sequence[SiteImage]) -> dict[str, int]:
    """SHA-256 and size of each image's file; files that cannot be read are left out."""
    paths = [data_dir / image.path for image in images]
    files = {file_digest(path).hex(): file_size(path) for path in paths}
    files.pop("", None)
    return files


def _add_same(
    data_dir: Path,
    images: Sequence[SiteImage],
    files: Mapping[str, int],
    choices: dict[str, list[str]],
) -> None:
    """Add the paths of images that are held-out files under another name."""
    sizes = set(files.values())
    chosen = {path for paths in choices.values() for path in paths}
    for image in images:
        path = data_dir / image.path
        if _text(image.path) in chosen or file_size(path) not in sizes:
            continue
        if file_digest(path).hex() in files:
            choices[image.class_name] = sorted(
                [*choices.get(image.class_name, []), _text(image.path)]
            )


def hold_out(
    images: Sequence[SiteImage], share: float, held: Mapping[str, Sequence[str]]
) -> tuple[tuple[SiteImage, ...], tuple[SiteImage, ...], dict[str, list[str]]]:
    """Set aside a share of every class for tests, at least one image and never all.

    A class is drawn once, when it is first seen, and keeps that choice: images that are added
    later may only be trained on, for an image that was trained on can never test. The draw
    depends on nothing but the paths.

    Args:
        images: the training images, classes together.
        share: of each new class with at least `LEAST` images, above 0, below 1; rounded half up.
        held: paths that are held out already, by class.

    Returns:
        The images to train on, those to test with, and all choices, old and new.
    """
    choices = {name: list(paths) for name, paths in held.items()}
    for name, group in groupby(images, key=lambda image: image.class_name):
        if name in choices:
            continue
        paths = [_text(image.path) for image in group]
        number = min(max(1, int(share * len(paths) + 0.5)), len(paths) - 1)
        drawn = sorted(paths, key=lambda path: (derive_seed(0, "holdout", path), path))
        choices[name] = sorted(drawn[:number]) if len(paths) >= LEAST else []
    tested = {path for paths in choices.values() for path in paths}
    train = tuple(image for image in images if _text(image.path) not in tested)
    test = tuple(image for image in images if _text(image.path) in tested)
    return train, test, choices


def read_holdout(file: Path) -> Held:
    """Choices that were made before; none if there is no file.

    Raises:
        SiteError: the file is damaged or cannot be read.
    """
    if not os.path.lexists(file):
        return Held()
    try:
        if not file.is_file():
            raise ValueError
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        held = Held(found["classes"], found["files"])
        if found["sha256"] != _checksum(held):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise SiteError(
            f"{file}: damaged; restore it from a backup (without it, images that were trained on "
            "would be drawn for tests)"
        ) from None
    return held


def write_holdout(file: Path, held: Held) -> None:
    """Remember the choices.

    Raises:
        StateError: the file cannot be written.
    """
    make_folder(file.parent)
    content = {"classes": held.classes, "files": held.files, "sha256": _checksum(held)}
    write_json_atomic(file, content)


@contextmanager
def holdout_lock(file: Path | None) -> Iterator[None]:
    """Let one run at a time read and extend a site's choices.

    Raises:
        SiteError: another run takes too long.
        StateError: the lock cannot be made in the file's folder.
    """
    if file is None:
        yield
        return
    make_folder(file.parent)
    busy = (
        f"{file}: another run has been reading this site for {_PATIENCE:.0f} s; end that one first"
    )
    with lock_file(file.with_suffix(".lock"), time.monotonic() + _PATIENCE, busy):
        yield


def _checksum(held: Held) -> str:
    text = json.dumps([held.classes, held.files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _text(path: str) -> str:
    """The path as text that any encoding of Unicode can hold: file systems allow others."""
    return path.encode(errors="backslashreplace").decode()
