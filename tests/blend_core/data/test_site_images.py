"""By what a worker notices between rounds that a site's images have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from blend_core.data.site_images import is_site, site_stamp


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for place in ("train/cat/1.png", "train/cat/deep/2.png", "test/cat/1.png", "novel/yak/1.png"):
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.write_bytes(b"abc")
    return tmp_path


CHANGES: dict[str, Callable[[Path], object]] = {
    "an image more": lambda site: (site / "train/cat/3.png").write_bytes(b""),
    "a class more": lambda site: (site / "test/dog.png").rename(site / "test/dog.jpg"),
    "an image less": lambda site: (site / "train/cat/deep/2.png").unlink(),
    "another name": lambda site: (site / "novel/yak/1.png").rename(site / "novel/yak/2.png"),
    "another size": lambda site: (site / "test/cat/1.png").write_bytes(b"abcd"),
    "another time": lambda site: os.utime(site / "test/cat/1.png", (1, 1)),
    "a class list": lambda site: (site / "classes.txt").write_text("cat\n"),
    "a manifest": lambda site: (site / "manifest.csv").write_text("path,label,split\n"),
    "a link that leads nowhere": lambda site: (site / "train/owl").symlink_to(site / "gone"),
    "a link out of it": lambda site: (site / "train/cat/out").symlink_to(site.parent),
    "nothing left": lambda site: site.rename(site.with_name("gone")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_counts_changes_the_stamp(site: Path, change: str) -> None:
    (site / "test/dog.png").write_bytes(b"abc")
    before = site_stamp(site)
    assert site_stamp(site) == before
    CHANGES[change](site)
    assert site_stamp(site) != before


def test_what_does_not_count_does_not_make_a_worker_read_everything_again(site: Path) -> None:
    before = site_stamp(site)
    (site / "worker.log").write_text("busy")
    (site / "train/cat/Thumbs.db").write_text("x")
    (site / "train/cat/._1.png").write_text("x")
    (site / "train/cat/self").symlink_to(site / "train")
    assert site_stamp(site) == before


def test_images_that_a_manifest_lists_count_wherever_they_are(site: Path) -> None:
    (site / "any").mkdir()
    (site / "any/1.png").write_bytes(b"abc")
    (site / "manifest.csv").write_text('path,label,split\nany/1.png,cat,train\n"open')
    before = site_stamp(site)
    (site / "any/1.png").write_bytes(b"abcd")
    assert site_stamp(site) != before


def test_a_folder_that_is_not_there_or_wrong_has_a_stamp_too(tmp_path: Path) -> None:
    assert len(site_stamp(tmp_path / "none")) == 64
    (tmp_path / "manifest.csv").mkdir()
    assert len(site_stamp(tmp_path)) == 64
    (tmp_path / "b").mkdir()
    (tmp_path / "b/manifest.csv").write_bytes(b"path\n\0\xff.png,\n" + b"x" * 200_000)
    assert len(site_stamp(tmp_path / "b")) == 64


@pytest.mark.parametrize("layout", ["train/", "test/", "manifest.csv"])
def test_a_site_is_recognised_by_any_layout(tmp_path: Path, layout: str) -> None:
    assert not is_site(tmp_path)
    if layout.endswith("/"):
        (tmp_path / layout).mkdir()
    else:
        (tmp_path / layout).touch()
    assert is_site(tmp_path)


def test_swapped_files_of_one_size_and_time_change_the_stamp(tmp_path: Path) -> None:
    first, second = (tmp_path / "train" / name / "0.bmp" for name in ("cat", "dog"))
    for number, file in enumerate((first, second)):
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes([number]) * 100)
        os.utime(file, (1000, 1000))
    before = site_stamp(tmp_path)
    assert site_stamp(tmp_path) == before
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    for file in (first, second):
        os.utime(file, (1000, 1000))
    assert site_stamp(tmp_path) != before
