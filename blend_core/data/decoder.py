"""Decodes a site's images, and says which could not be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from torch import Tensor

from blend_core.data.findings import Finding, error, warning
from blend_core.data.images import MAX_PIXELS, TooLargeError, decode_image
from blend_core.data.listing import SiteImage
from blend_core.data.store import ImageStore, load_images
from blend_core.data.vocabulary import quoted

__all__ = ["SMALL", "Decoder"]

SMALL = 32
"""Images whose shorter side has fewer pixels are warned about."""


class Decoder:
    """Decodes a site's images into a store, and remembers which could not be used, and why.

    Args:
        data_dir: the site's folder.
        store: receives the images.
        total: how many there are, for `progress`.
        progress: called with the images begun so far and `total`, in any thread.
    """

    def __init__(
        self,
        data_dir: Path,
        store: ImageStore,
        total: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._data_dir, self._store, self._total, self._progress = data_dir, store, total, progress
        self._numbers = count(1)  # Unlike "+= 1" it may be used by several threads.
        self._bad: list[tuple[str, str]] = []  # path and reason
        self._too_large: list[str] = []
        self._small: list[str] = []

    def decode(
        self, images: Sequence[SiteImage], prepare: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[SiteImage, ...], Sequence[Tensor]]:
        """Decode images in a few threads, once each.

        Args:
            images: of one part.
            prepare: called with uint8 [3, H, W].

        Returns:
            The images that can be used, and what `prepare` made of them, in the same order.

        Raises:
            SiteError: the store is full.
        """
        small: set[SiteImage] = set()

        def decode(image: SiteImage) -> Tensor:
            self._progress(next(self._numbers), self._total)
            decoded = decode_image(self._data_dir / image.path)
            if min(decoded.shape[1:]) < SMALL:
                small.add(image)
            return prepare(decoded)

        pixels, failures = load_images(images, decode, self._store)
        self._small += [image.path for image in images if image in small]
        for position, failure in failures:
            path = self._data_dir / images[position].path
            if isinstance(failure, TooLargeError):
                self._too_large.append(images[position].path)
            else:
                self._bad.append((images[position].path, str(failure).removeprefix(f"{path}: ")))
        failed = {position for position, _ in failures}
        return tuple(i for at, i in enumerate(images) if at not in failed), pixels

    def report(self, skip_bad: bool, findings: list[Finding]) -> None:
        """Say which images could not be used: E06, or W03 with `skip_bad`, and W06."""
        if self._bad:
            one = len(self._bad) == 1
            what = "1 image" if one else f"{len(self._bad)} images"
            names = quoted(path for path, _ in self._bad)
            first = f"the first: {self._bad[0][1].partition(';')[0]}"
            if skip_bad:
                text = f"{self._data_dir}: {what} left out: {names} ({first})"
                findings.append(warning("W03", text))
            else:
                fix = f"replace or remove {'it' if one else 'them'}, or set skip-bad"
                text = f"{self._data_dir}: {what} cannot be used: {names}; {fix} ({first})"
                findings.append(error("E06", text))
        if self._too_large:
            text = (
                f"{self._data_dir}: left out images of more than {MAX_PIXELS:,} pixels: "
                f"{quoted(self._too_large)}; shrink them"
            )
            findings.append(warning("W06", text))
        if self._small:
            text = (
                f"{self._data_dir}: images whose shorter side is below {SMALL} pixels: "
                f"{quoted(self._small)}; they are used"
            )
            findings.append(warning("W06", text))
