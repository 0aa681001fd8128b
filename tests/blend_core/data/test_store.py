"""Decoded images: once each, in memory up to a budget, in a file beyond it."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from blend_core.data import store as store_module
from blend_core.data.store import ImageStore, StoredImages, load_images
from blend_core.errors import SiteError


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch) -> None:
    """Stores of other tests, which the garbage collector may drop at any moment, do not count."""
    monkeypatch.setattr(store_module, "_use", store_module._Use())


def picture(value: int, size: int = 10) -> torch.Tensor:
    return torch.full((3, size, size), value, dtype=torch.uint8)


def test_images_beyond_the_budget_lie_in_a_file_and_come_back_as_they_were(tmp_path: Path) -> None:
    store = ImageStore(700, tmp_path)
    images, bad = load_images(range(5), picture, store)
    assert bad == []
    assert store_module._use.total == 600
    assert store.spilled == 900
    assert [int(image[0, 0, 0]) for image in images] == [0, 1, 2, 3, 4]
    assert all(image.shape == (3, 10, 10) for image in images)
    assert list(tmp_path.iterdir()) == []  # nothing to clean up, whenever the process ends


def test_the_budget_counts_all_stores_of_the_process_and_is_given_back() -> None:
    first = ImageStore(600)
    load_images(range(2), picture, first)
    second = ImageStore(600)
    second.add(picture(9))
    assert second.spilled == 300
    del first
    gc.collect()
    assert store_module._use.total == 0
    second.add(picture(9))
    assert second.spilled == 300


def test_each_image_is_decoded_once_and_in_the_order_of_its_source() -> None:
    calls: list[int] = []
    lock = threading.Lock()

    def decode(number: int) -> torch.Tensor:
        with lock:
            calls.append(number)
        return picture(number % 250)

    images, _ = load_images(range(300), decode, ImageStore(10**9))
    for _ in range(3):
        assert [int(image[0, 0, 0]) for image in images] == [n % 250 for n in range(300)]
    assert sorted(calls) == list(range(300))


def test_few_images_are_decoded_ahead_of_the_one_that_is_stored(monkeypatch) -> None:
    started: list[int] = []
    behind: list[int] = []

    def decode(number: int) -> torch.Tensor:
        started.append(number)
        return picture(0)

    store = ImageStore(10**9)
    kept = store.add

    def add(image: torch.Tensor) -> int:
        behind.append(len(started) - len(store))
        return kept(image)

    monkeypatch.setattr(store, "add", add)
    load_images(range(500), decode, store)
    assert max(behind) <= store_module._DECODERS * store_module._AHEAD + 1


def test_unreadable_images_are_left_out_and_named_by_position() -> None:
    def decode(number: int) -> torch.Tensor:
        if number % 2:
            raise SiteError(f"no {number}")
        return picture(number)

    images, bad = load_images(range(5), decode, ImageStore(10**9))
    assert [int(image[0, 0, 0]) for image in images] == [0, 2, 4]
    assert [(position, str(error)) for position, error in bad] == [(1, "no 1"), (3, "no 3")]


def test_an_error_that_is_not_the_images_own_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        load_images([1, 0], lambda n: picture(1 // n), ImageStore(0))


def test_a_view_does_not_keep_the_whole_image_in_memory() -> None:
    store = ImageStore(10**9)
    key = store.add(picture(3, 100)[:, :10, :10])
    assert store.get(key).untyped_storage().nbytes() == 300


def test_a_full_disk_is_one_line_that_says_what_to_free(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SiteError, match=r"No space left on device; free space .*image_memory"):
        ImageStore(0, tmp_path).add(picture(1))


def test_slices_are_views_of_the_same_images() -> None:
    images, _ = load_images(range(6), picture, ImageStore(10**9))
    part = images[1:5:2]
    assert isinstance(part, StoredImages)
    assert part.store is images.store
    assert [int(image[0, 0, 0]) for image in part] == [1, 3]


def test_no_folder_for_temporary_files_is_one_line(monkeypatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(SiteError, match="TMPDIR: decoded images do not fit"):
        ImageStore(0).add(picture(1))
