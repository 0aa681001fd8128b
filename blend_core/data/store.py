"""Decoded images: each is decoded once, then kept in memory, or in a file when memory is short."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar, overload

import torch
from torch import Tensor

from blend_core.errors import SiteError

__all__ = ["GIB", "ImageStore", "StoredImages", "load_images"]

GIB = 1024**3
# Threads that decode; Pillow's decoders let other threads run.
_DECODERS = min(4, os.cpu_count() or 1)
# Images that are decoded ahead of the one that is stored next, per thread.
_AHEAD = 8

S = TypeVar("S")


class _Use:
    """Bytes that all stores of this process keep in memory."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may drop a store, which gives back, at any moment.
        self.lock = threading.RLock()
        self.total = 0

    def take(self, size: int, budget: int) -> bool:
        with self.lock:
            if self.total + size > budget:
                return False
            self.total += size
            return True

    def give_back(self, taken: list[int]) -> None:
        with self.lock:
            self.total -= sum(taken)


_use = _Use()


class ImageStore:
    """Keeps images in memory up to a budget, further ones in a temporary file.

    The file has no name from the start, so nothing is left when the process ends, however it
    ends, and nothing stale is ever read.

    Args:
        budget: bytes that all stores of this process together may keep in memory.
        folder: where the file is made; None: the system's folder for such files.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self._budget = budget
        self._folder = folder
        self._file: BinaryIO | None = None
        self._end = 0
        self._lock = threading.Lock()
        # In memory: the image. In the file: where it begins, and its shape.
        self._entries: list[Tensor | tuple[int, torch.Size]] = []
        self._taken: list[int] = []
        weakref.finalize(self, _use.give_back, self._taken)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def spilled(self) -> int:
        """Bytes in the file."""
        return self._end

    def add(self, image: Tensor) -> int:
        """Keep an image, uint8 [3, H, W]; returns its key.

        Raises:
            SiteError: it cannot be written to the file.
        """
        size = image.numel()
        with self._lock:
            if _use.take(size, self._budget):
                self._taken.append(size)
                # A view would keep the whole of what it is cut out of.
                whole = image.untyped_storage().nbytes() == size
                self._entries.append(image if whole else image.clone())
            else:
                self._entries.append((self._append(image), image.shape))
            return len(self._entries) - 1

    def get(self, key: int) -> Tensor:
        """The image of a key.

        Raises:
            SiteError: it cannot be read back.
        """
        entry = self._entries[key]
        if isinstance(entry, Tensor):
            return entry
        start, shape = entry
        assert self._file is not None
        data = bytearray(shape.numel())
        try:
            read = os.preadv(self._file.fileno(), [data], start)
        except OSError as error:
            raise SiteError(
                f"temporary file of images: {error.strerror}; start the site again"
            ) from None
        if read != len(data):
            raise SiteError(
                "temporary file of images: cut short by somebody else; start the site again"
            )
        return torch.frombuffer(data, dtype=torch.uint8).view(shape)

    def _append(self, image: Tensor) -> int:
        place: Path | str = self._folder or "TMPDIR"
        try:
            place = self._folder or Path(tempfile.gettempdir())
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            data = image.contiguous().numpy().data.cast("B")
            written = 0
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], self._end + written)
        except OSError as error:
            raise SiteError(
                f"{place}: decoded images do not fit into memory (data.image_memory) nor into a "
                f"temporary file: {error.strerror}; free space there or raise data.image_memory"
            ) from None
        start, self._end = self._end, self._end + len(data)
        return start


class StoredImages(Sequence[Tensor]):
    """Some images of a store, in an order of their own.

    Args:
        store: where they are.
        keys: theirs.
    """

    def __init__(self, store: ImageStore, keys: Sequence[int]) -> None:
        self.store = store
        self.keys = list(keys)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> StoredImages: ...
    def __getitem__(self, at: int | slice) -> Tensor | StoredImages:
        if isinstance(at, slice):
            return StoredImages(self.store, self.keys[at])
        return self.store.get(self.keys[at])


def load_images(
    sources: Sequence[S], decode: Callable[[S], Tensor], store: ImageStore
) -> tuple[StoredImages, list[tuple[int, SiteError]]]:
    """Decode images in a few threads and keep them in a store, in the order of their sources.

    Args:
        sources: what `decode` is called with, once each.
        decode: returns uint8 [3, H, W], or raises `SiteError`.
        store: receives the images.

    Returns:
        The images that could be decoded, and (position, error) of the sources that could not.
    """

    def attempt(source: S) -> Tensor | SiteError:
        try:
            return decode(source)
        except SiteError as error:
            return error

    keys: list[int] = []
    bad: list[tuple[int, SiteError]] = []
    step = _DECODERS * _AHEAD
    with ThreadPoolExecutor(_DECODERS, "decode") as pool:
        ahead = list(map(lambda s: pool.submit(attempt, s), sources[:step]))
        for position in range(len(sources)):
            found = ahead[position % step].result()
            following = position + step
            if following < len(sources):
                ahead[position % step] = pool.submit(attempt, sources[following])
            if isinstance(found, SiteError):
                bad.append((position, found))
            else:
                keys.append(store.add(found))
    return StoredImages(store, keys), bad
