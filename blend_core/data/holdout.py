"""A test part for sites without test images, which stays the same over all rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from blend_core.data.listing import SiteImage, classes_of
from blend_core.data.site_images import SiteImages
from blend_core.errors import SiteError
from blend_core.randomness import derive_seed
from blend_core.state import make_folder, write_json_atomic

__all__ = ["LEAST", "apply_holdout", "hold_out", "read_holdout", "write_holdout"]

LEAST = 5
"""Classes with fewer images keep all of them for training (PROTOCOL 7.2)."""

# Paths that are held out, by class.
Held = dict[str, list[str]]


def apply_holdout(
    images: SiteImages, share: float, file: Path | None
) -> tuple[SiteImages, Held | None]:
    """Move what is held out from train to test; nothing is written.

    What was held out before always is, whatever the share has become and although test images came
    later: otherwise it would be trained on. New classes are drawn only where a share is asked for
    and there are no test images.

    Args:
        images: the site's.
        share: as for `hold_out`, or 0.
        file: earlier choices; None: there are none.

    Returns:
        The images, and what is to be remembered; None: nothing new.

    Raises:
        SiteError: as `read_holdout`.
    """
    known = {} if file is None else read_holdout(file)
    draws = share > 0 and not images.test
    choices = known if draws else {**{n: [] for n in classes_of(images.train)}, **known}
    train, test, held = hold_out(images.train, share, choices)
    moved = replace(images, train=train, test=(*images.test, *test))
    return moved, held if draws and held != known else None


def hold_out(
    images: Sequence[SiteImage], share: float, held: Mapping[str, Sequence[str]]
) -> tuple[tuple[SiteImage, ...], tuple[SiteImage, ...], Held]:
    """Set aside a share of every class for tests, at least one image and never all.

    A class is drawn once, when it is first seen, and keeps that choice: images that are added
    later may only be trained on, for an image that was trained on can never test. The draw
    depends on nothing but the paths.

    Args:
        images: the training images, classes together.
        share: of each new class with at least `LEAST` images, above 0, below 1; rounded half up.
        held: earlier choices, from `read_holdout`.

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
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(paths, list) and all(isinstance(path, str) for path in paths)
        for paths in found.values()
    ):
        raise SiteError(
            f"{file}: damaged; restore it from a backup (without it, images that were trained on "
            "would be drawn for tests)"
        )
    return found


def write_holdout(file: Path, held: Held) -> None:
    """Remember the choices.

    Raises:
        StateError: the file cannot be written.
    """
    make_folder(file.parent)
    write_json_atomic(file, held)


def _text(path: str) -> str:
    """The path as text that any encoding of Unicode can hold: file systems allow others."""
    return path.encode(errors="backslashreplace").decode()
