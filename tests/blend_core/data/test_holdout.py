"""The test part that a site without test images sets aside."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from blend_core.data import ClientData, Preprocess, file_stamp, folders, holdout
from blend_core.data.folders import FolderOptions, examine, load_folder
from blend_core.data.holdout import Held, apply_holdout, hold_out, holdout_lock, read_holdout
from blend_core.data.listing import SiteImage
from blend_core.data.site_images import list_site
from blend_core.data.store import ImageStore
from blend_core.errors import SiteError
from blend_core.state import StateError


def images(**counts: int) -> list[SiteImage]:
    return [
        SiteImage(f"train/{name}/{n:03d}.png", name)
        for name, count in counts.items()
        for n in range(count)
    ]


def drawn(share: float, **counts: int) -> dict[str, int]:
    """How many images of each class are held out."""
    train, test, _ = hold_out(images(**counts), share, {})
    assert sorted([*train, *test], key=lambda i: i.path) == images(**counts)
    return {name: sum(i.class_name == name for i in test) for name in counts}


def test_a_share_of_every_class_with_at_least_five_images_is_held_out() -> None:
    assert drawn(0.2, ant=4, bee=5, cat=7, dog=8, emu=100) == {
        "ant": 0,
        "bee": 1,
        "cat": 1,  # 1.4
        "dog": 2,  # 1.6
        "emu": 20,
    }


def test_a_class_never_loses_all_and_never_gives_none() -> None:
    assert drawn(0.01, ant=5) == {"ant": 1}
    assert drawn(0.99, ant=5) == {"ant": 4}


def test_the_draw_is_by_chance_and_the_same_everywhere() -> None:
    first = hold_out(images(ant=100, bee=100), 0.5, {})[2]
    assert first == hold_out(images(ant=100, bee=100), 0.5, {})[2]
    numbers = [{path[-7:-4] for path in paths} for paths in first.values()]
    assert numbers[0] != numbers[1]
    assert numbers[0] != {f"{n:03d}" for n in range(50)}


def test_images_that_come_later_are_trained_on_and_the_test_part_stays() -> None:
    _, test, held = hold_out(images(ant=10, bee=4), 0.2, {})
    train, later, again = hold_out(images(ant=50, bee=50, cat=5), 0.2, held)
    assert [i for i in later if i.class_name == "ant"] == list(test)
    # Bees had too few when they were first seen: all of them have been trained on since.
    assert not [i for i in later if i.class_name == "bee"]
    assert sum(i.class_name == "cat" for i in later) == 1
    assert len(train) + len(later) == 105
    assert again["ant"] == held["ant"]


PRE = Preprocess(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def add(root: Path, part: str, name: str, numbers: range) -> None:
    folder = root / part / name
    folder.mkdir(parents=True, exist_ok=True)
    for n in numbers:
        Image.new("RGB", (40, 40), (n, len(name), ord(name[0]))).save(folder / f"{n}.png")


def load(root: Path, options: FolderOptions) -> ClientData:
    return load_folder(root, PRE, options, ImageStore(10**7))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    add(tmp_path / "data", "train", "cat", range(10))
    add(tmp_path / "data", "train", "horse", range(4))
    return tmp_path / "data"


@pytest.fixture
def options(tmp_path: Path) -> FolderOptions:
    return FolderOptions("node", (), "a {}.", 0.2, tmp_path / "state" / "holdout" / "oslo.json")


def reds(data: ClientData) -> list[int]:
    return [int(image[0, 0, 0]) for image in data.test_base.images]


def test_the_test_part_stays_the_same_over_rounds_although_images_are_added(
    site: Path, options: FolderOptions
) -> None:
    first = load(site, options)
    assert (len(first.train), len(first.test_base)) == (12, 2)
    assert first.test_base.labels.tolist() == [0, 0]
    add(site, "train", "cat", range(10, 30))
    second = load(site, options)
    assert (len(second.train), reds(second)) == (32, reds(first))
    assert options.holdout_file is not None
    held = read_holdout(options.holdout_file)
    assert sorted(held.classes) == ["cat", "horse"]
    assert held.classes["horse"] == []
    assert sorted(held.files.values()) == sorted(
        (site / path).stat().st_size for path in held.classes["cat"]
    )


def test_the_check_shows_the_same_part_and_writes_nothing(
    site: Path, options: FolderOptions
) -> None:
    found = examine(site, options)
    assert found.train == {"cat": 8, "horse": 4}
    assert found.test == {"cat": 2}
    assert options.holdout_file is not None
    assert not options.holdout_file.parent.exists()


def test_a_site_with_test_images_and_one_that_does_not_ask_keep_theirs(
    site: Path, options: FolderOptions
) -> None:
    assert len(load(site, replace(options, holdout=0.0)).train) == 14
    add(site, "test", "horse", range(50, 51))
    data = load(site, options)
    assert (len(data.train), len(data.test_base)) == (14, 1)
    assert options.holdout_file is not None
    assert not options.holdout_file.exists()


def test_held_out_images_are_never_trained_on_when_nothing_is_to_be_held_out_any_more(
    site: Path, options: FolderOptions
) -> None:
    first = load(site, options)
    assert options.holdout_file is not None
    remembered = options.holdout_file.read_bytes()
    add(site, "train", "newt", range(60, 70))
    second = load(site, replace(options, holdout=0.0))
    assert reds(second) == reds(first)
    assert len(second.train) == len(first.train) + 10  # a class that is new is not drawn from
    assert options.holdout_file.read_bytes() == remembered


@pytest.mark.parametrize("text", ["", "[]", '{"cat": 3}', '{"cat": [1]}', "{"])
def test_a_damaged_file_is_named_and_not_drawn_anew(
    site: Path, options: FolderOptions, text: str
) -> None:
    assert options.holdout_file is not None
    options.holdout_file.parent.mkdir(parents=True)
    options.holdout_file.write_text(text)
    with pytest.raises(SiteError, match=r"oslo\.json: damaged; restore"):
        load(site, options)
    assert options.holdout_file.read_text() == text


def test_file_names_that_are_no_text_are_remembered_too(site: Path, options: FolderOptions) -> None:
    (site / "train/cat/0.png").rename(site / "train/cat" / "\udcff.png")
    options = replace(options, holdout=0.9)
    first = load(site, options)
    assert options.holdout_file is not None
    assert len(read_holdout(options.holdout_file).classes["cat"]) == 9
    assert reds(load(site, options)) == reds(first)


def colours(images: Sequence[Tensor]) -> set[tuple[int, ...]]:
    """What tells the images of `add` apart, also those of two classes."""
    return {tuple(image[:, 0, 0].tolist()) for image in images}


MOVES = {
    "a class is renamed": lambda s: (s / "train/cat").rename(s / "train/kitty"),
    "images move into a sub-folder": lambda s: [
        (s / "train/cat/2024").mkdir(),
        *(p.rename(s / "train/cat/2024" / p.name) for p in (s / "train/cat").glob("*.png")),
    ],
    "a link sorts before their folder": lambda s: [
        (s / "train/cat").rename(s / "train/real"),
        (s / "train/cat").mkdir(),
        (s / "train/real").rename(s / "train/cat/b"),
        (s / "train/cat/a").symlink_to(s / "train/cat/b"),
    ],
}


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("move", MOVES)
def test_a_held_out_image_stays_one_under_whatever_name_its_file_lies(
    site: Path, options: FolderOptions, move: str, share: float
) -> None:
    held = colours(load(site, options).test_base.images)
    assert len(held) == 2
    MOVES[move](site)
    data = load(site, replace(options, holdout=share))
    assert colours(data.test_base.images) == held
    assert not colours(data.train.images) & held


def test_copies_of_a_held_out_image_are_held_out_with_it(
    site: Path, options: FolderOptions
) -> None:
    for n in range(10):
        shutil.copyfile(site / f"train/cat/{n}.png", site / f"train/cat/copy-{n}.png")
    data = load(site, options)
    assert len(reds(data)) >= 4
    assert not colours(data.train.images) & colours(data.test_base.images)


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", '{"cat": []}', None, '{"classes": {}, "files": {}, "sha256": "00"}'],
)
def test_a_list_of_held_out_images_that_was_emptied_is_damaged(
    site: Path, options: FolderOptions, content: str | None
) -> None:
    load(site, options)
    assert options.holdout_file is not None
    options.holdout_file.unlink()
    if content is None:
        options.holdout_file.symlink_to(site / "nowhere")
    else:
        options.holdout_file.write_text(content)
    with pytest.raises(SiteError, match=r"^E13 .*damaged; restore it from a backup"):
        load(site, replace(options, holdout=0.0))


def test_of_two_runs_at_once_the_second_takes_the_choice_of_the_first(
    site: Path, options: FolderOptions, monkeypatch
) -> None:
    other: list[ClientData] = []
    second = threading.Thread(
        target=lambda: other.append(load(site, replace(options, holdout=0.5)))
    )
    written = folders.write_holdout

    def slowly(file: Path, held: Held) -> None:
        second.start()
        time.sleep(0.3)
        written(file, held)

    monkeypatch.setattr(folders, "write_holdout", slowly)
    first = load(site, options)
    monkeypatch.undo()
    second.join(timeout=30)
    assert reds(other[0]) == reds(first)


def test_a_lock_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    # What an unwritable folder would say, also where root may write anywhere.
    (tmp_path / "oslo.lock").mkdir()
    with (
        pytest.raises(StateError, match=r"oslo\.lock: cannot be opened: Is a directory"),
        holdout_lock(tmp_path / "oslo.json"),
    ):
        pass


def test_a_held_out_file_is_read_once_to_be_remembered(site: Path, monkeypatch) -> None:
    read: list[Path] = []
    digest = holdout.file_digest
    monkeypatch.setattr(holdout, "file_digest", lambda path: read.append(path) or digest(path))
    _, held = apply_holdout(site, list_site(site, []), 0.9, None)
    assert held is not None
    assert len(held.files) == 9
    drawn = [path for path in read if str(path.relative_to(site)) in held.classes["cat"]]
    assert sorted(drawn) == sorted(set(drawn))


def test_a_site_that_runs_notices_what_another_run_holds_out(
    site: Path, options: FolderOptions
) -> None:
    before = file_stamp(options.holdout_file)
    assert file_stamp(options.holdout_file) == before
    load(site, options)
    after = file_stamp(options.holdout_file)
    assert after != before
    load(site, options)
    assert file_stamp(options.holdout_file) == after
