"""Every code of PROTOCOL 7.3: one folder for each, through the check and where a site trains."""

from __future__ import annotations

import logging
import os
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from blend_core.data import ClientData, Preprocess, site_stamp
from blend_core.data.folders import Examination, FolderOptions, examine, load_folder
from blend_core.data.images import MAX_PIXELS
from blend_core.data.store import ImageStore
from blend_core.errors import SiteError

PRE = Preprocess(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NODE = FolderOptions("node", (), "a photo of a {}.")


def add(root: Path, *places: str, size: tuple[int, int] = (32, 32)) -> None:
    """Write a picture of its own colour to each place below `root`."""
    for place in places:
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = np.random.default_rng(list(place.encode())).integers(0, 256, 3)
        Image.new("RGB", size, tuple(map(int, colour))).save(path)


def load(root: Path, options: FolderOptions = NODE) -> ClientData:
    return load_folder(root, PRE, options, ImageStore(10**7))


def codes(found: Examination) -> list[str]:
    return [finding.code for finding in found.findings]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which nothing is wrong."""
    add(tmp_path, *(f"train/{name}/{n}.png" for name in ("cat", "dog") for n in (1, 2)))
    add(tmp_path, "test/cat/9.png", "test/dog/9.png")
    return tmp_path


def manifest(site: Path, *lines: str) -> None:
    (site / "manifest.csv").write_text("\n".join(["path,label,split", *lines]))


def no_folder(site: Path) -> None:
    site.rename(site.with_name("elsewhere"))


def no_parts(site: Path) -> None:
    (site / "train").rename(site / "training")
    (site / "test").rename(site / "testing")


def loose(site: Path) -> None:
    add(site, "train/1.png")


def wrong_split(site: Path) -> None:
    manifest(site, "train/cat/1.png,cat,tran", "train/dog/1.png,dog,train")


def way_out(site: Path) -> None:
    manifest(site, "../cat.png,cat,train", "train/dog/1.png,dog,train")


def no_image(site: Path) -> None:
    (site / "train/cat/bad.png").write_bytes(b"")


def one_class(site: Path) -> None:
    for part in ("train", "test"):
        (site / part / "dog").rename(site / f"{part}-dog")


def no_images(site: Path) -> None:
    for path in site.rglob("*.png"):
        path.unlink()


def same_reading(site: Path) -> None:
    add(site, "train/Red_Fox/1.png", "train/Red_Fox/2.png", "train/red fox/1.png")
    add(site, "train/red fox/2.png")


def empty_name(site: Path) -> None:
    add(site, "train/_/1.png", "train/_/2.png")


def empty_folder(site: Path) -> None:
    (site / "train/emu").mkdir()


def only_tested(site: Path) -> None:
    add(site, "test/emu/1.png")


def repeated(site: Path) -> None:
    (site / "test/cat/same.png").write_bytes((site / "train/cat/1.png").read_bytes())


def too_few(site: Path) -> None:
    add(site, "train/emu/1.png")


def misspelt_part(site: Path) -> None:
    add(site, "Train/cat/3.png")


def in_two_classes(site: Path) -> None:
    (site / "train/cat/same.png").write_bytes((site / "train/dog/1.png").read_bytes())


def from_a_phone(site: Path) -> None:
    (site / "train/cat/3.HEIC").write_bytes(b"\0\0\0 ftypheic")


def small(site: Path) -> None:
    add(site, "train/cat/small.png", size=(31, 40))


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("E01", no_folder),
        ("E02", no_parts),
        ("E03", loose),
        ("E04", wrong_split),
        ("E05", way_out),
        ("E06", no_image),
        ("E07", one_class),
        ("E08", no_images),
        ("E09", same_reading),
        ("E12", empty_name),
    ],
)
def test_each_error_is_found_by_the_check_and_keeps_the_site_from_joining(
    site: Path, code: str, spoil: Callable[[Path], None]
) -> None:
    assert codes(examine(site, NODE)) == []
    load(site)
    spoil(site)
    found = examine(site, NODE)
    assert [finding.code for finding in found.errors] == [code]
    with pytest.raises(SiteError) as refusal:
        load(site)
    assert str(refusal.value) == str(found.errors[0])
    assert str(refusal.value).startswith(f"{code} ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("W01", empty_folder),
        ("W02", only_tested),
        ("W04", repeated),
        ("W05", too_few),
        ("W06", small),
        ("W07", misspelt_part),
        ("W08", in_two_classes),
        ("W09", from_a_phone),
    ],
)
def test_each_warning_is_found_and_logged_and_the_site_joins(
    site: Path, code: str, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(site)
    assert codes(examine(site, NODE)) == [code]
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        load(site)
    assert f" {code} {site}" in caplog.text


def test_e10_and_e12_depend_on_the_settings(site: Path) -> None:
    wrong = replace(NODE, label_space="federation", federation_classes=("cat", "owl"), template="a")
    assert codes(examine(site, wrong)) == ["E12", "E10"]


def test_the_check_names_every_error_and_not_only_the_first(site: Path) -> None:
    for spoil in (loose, no_image, same_reading, empty_name, small, repeated):
        spoil(site)
    assert sorted(codes(examine(site, NODE))) == ["E03", "E06", "E09", "E12", "W04", "W06"]


def test_w03_bad_images_are_left_out_on_demand_and_counted(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "train/cat/1.png").write_bytes(b"no image")
    (site / "test/dog/9.png").unlink()
    (site / "test/dog/9.png").symlink_to(site / "nowhere")
    options = replace(NODE, skip_bad=True)
    found = examine(site, options)
    assert [f.code for f in found.findings] == ["W03", "W05"]
    assert '2 images left out: "train/cat/1.png", "test/dog/9.png"' in str(found.findings[0])
    data = load(site, options)
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.test_base.labels.tolist() == [0]
    assert "W03" in caplog.text


def test_e08_when_no_usable_image_is_left(site: Path) -> None:
    for path in site.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(SiteError, match=r"^E08 .* no usable image is left"):
        load(site, replace(NODE, skip_bad=True))


def test_w04_is_an_error_where_strict(site: Path) -> None:
    repeated(site)
    strict = replace(NODE, strict=True)
    assert [str(error) for error in examine(site, strict).errors] == [
        f'W04 {site}: 1 test image also occurs in train: "test/cat/same.png"; scores will be too '
        "high; remove one of the two"
    ]
    with pytest.raises(SiteError, match=r"^W04 "):
        load(site, strict)


def test_w04_compares_bytes_and_not_sizes(site: Path) -> None:
    same = (site / "train/dog/1.png").read_bytes()
    (site / "test/cat/9.png").write_bytes(same[:-1] + b"x")
    assert "W04" not in codes(examine(site, replace(NODE, skip_bad=True)))


def test_w05_a_class_more_than_fifty_times_larger(site: Path) -> None:
    add(site, *(f"train/cat/more{n}.png" for n in range(98)))
    assert codes(examine(site, NODE)) == []  # 100 and 2
    add(site, "train/cat/one-more.png")
    (found,) = examine(site, NODE).findings
    assert str(found) == (
        f'W05 {site}: "cat" has 101 training images, "dog" 2, more than 50 times fewer'
    )


def test_w06_an_image_beyond_the_decompression_limit_is_left_out(site: Path) -> None:
    Image.new("1", (MAX_PIXELS // 9000, 9001)).save(site / "train/cat/huge.png")
    (found,) = examine(site, NODE).findings
    assert found.code == "W06"
    assert '"train/cat/huge.png"; shrink them' in found.message
    assert load(site).train.labels.tolist() == [0, 0, 1, 1]


def test_one_trained_class_among_several_is_warned_about(site: Path) -> None:
    one_class(site)
    (site / "classes.txt").write_text("cat\ndog\n")
    found = examine(site, NODE).findings[-1]
    assert found.code == "W05"
    assert 'only "cat" has training images' in found.message


def test_counts_are_of_usable_images_by_class(site: Path) -> None:
    no_image(site)
    add(site, "novel/yak/1.png")
    found = examine(site, NODE)
    assert found.train == {"cat": 2, "dog": 2}
    assert found.test == {"cat": 1, "dog": 1}
    assert found.novel == {"yak": 1}
    assert found.base_names == ("cat", "dog")


def test_every_image_is_decoded_once_and_progress_reaches_the_end(site: Path) -> None:
    steps: list[tuple[int, int]] = []
    examine(site, NODE, lambda done, total: steps.append((done, total)))
    assert sorted(steps) == [(n, 6) for n in range(1, 7)]


def test_odd_but_usable_images_are_used(site: Path) -> None:
    folder = site / "train/cat"
    Image.new("P", (40, 40)).save(folder / "palette.png")
    Image.new("L", (40, 40)).save(folder / "grey.jpg")
    Image.new("CMYK", (40, 40)).save(folder / "cmyk.jpg")
    Image.new("RGBA", (40, 40)).save(folder / "alpha.webp")
    Image.fromarray(np.zeros((40, 40), np.uint16)).save(folder / "deep.tiff")
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    (folder / "x.jpg").mkdir()
    add(site, "train/cat/x.jpg/a/b/deep.PNG")
    assert examine(site, NODE).findings == ()
    assert load(site).train.labels.tolist() == [0] * 9 + [1] * 2


def test_an_image_that_is_cut_short_is_named(site: Path) -> None:
    whole = (site / "train/cat/1.png").read_bytes()
    (site / "train/cat/1.png").write_bytes(whole[: len(whole) // 2])
    assert codes(examine(site, NODE)) == ["E06", "W05"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_and_folders_without_permission_are_named(site: Path) -> None:
    (site / "train/cat/1.png").chmod(0)
    (site / "train/dog").chmod(0)
    found = codes(examine(site, NODE))
    (site / "train/dog").chmod(0o700)
    assert found[:2] == ["E01", "W02"]
    assert "E06" in found


def test_two_folders_whose_accents_are_spelt_differently_are_one_name(site: Path) -> None:
    for form in ("NFC", "NFD"):
        name = unicodedata.normalize(form, "café")
        add(site, f"train/{name}/1.png", f"train/{name}/2.png")
    (found,) = examine(site, NODE).findings
    assert found.code == "E09"
    assert 'two folders are called "café"' in found.message


def test_a_message_stays_one_line_whatever_a_folder_is_called(site: Path) -> None:
    (site / "train/a\nb\x1b[31m").mkdir()
    (found,) = examine(site, NODE).findings
    assert str(found) == f"W01 {site}/train/a b[31m: ignored, no images in it"


def test_a_folder_whose_name_is_no_text_is_named_in_text(site: Path) -> None:
    folder = os.fsencode(site / "train") + b"/\xff\xfe"
    os.mkdir(folder)
    for name in (b"1.png", b"2.png"):
        Path(os.fsdecode(folder + b"/" + name)).write_bytes(
            (site / "train/cat" / os.fsdecode(name)).read_bytes()
        )
    (found,) = examine(site, NODE).errors
    assert (
        str(found).encode()
        == f'E12 {site}: class name "\\udcff\\udcfe" is not UTF-8; rename it'.encode()
    )


@pytest.mark.parametrize("name", ["manifest.csv", "classes.txt"])
def test_a_pipe_in_the_place_of_a_list_is_named_and_nobody_waits_for_it(
    site: Path, name: str
) -> None:
    os.mkfifo(site / name)
    found = [str(finding).replace(str(site), "SITE") for finding in examine(site, NODE).findings]
    assert f"E04 SITE/{name}: cannot be read: no regular file; mend or remove it" in found
    assert len(site_stamp(site)) == 64


def test_a_pipe_among_the_images_is_named_and_nobody_waits_for_it(site: Path) -> None:
    os.mkfifo(site / "train" / "cat" / "pipe.png")
    found = examine(site, NODE)
    assert codes(found) == ["E06"]
    assert "no regular file" in found.errors[0].message


def test_folders_without_end_are_named_at_once(site: Path) -> None:
    deep = site / "train" / "cat"
    for _ in range(120):
        deep /= "d"
    deep.mkdir(parents=True)
    found = examine(site, NODE)
    assert [finding.code for finding in found.errors] == ["E03"]
    assert "more than 50 folders deep" in found.errors[0].message
    assert len(site_stamp(site)) == 64


def test_what_was_held_out_is_never_trained_on_although_test_images_come_and_go(
    site: Path, tmp_path: Path
) -> None:
    shutil.rmtree(site / "test")
    add(site, *(f"train/cat/more{i}.png" for i in range(8)))
    options = replace(NODE, holdout=0.25, holdout_file=tmp_path / "held.json")
    before = load(site, options)
    assert len(before.test_base) > 0
    remembered = (tmp_path / "held.json").read_bytes()
    add(site, "test/dog/late.png")
    beside = load(site, options)
    assert len(beside.train) == len(before.train)
    assert len(beside.test_base) == len(before.test_base) + 1
    assert (tmp_path / "held.json").read_bytes() == remembered
    shutil.rmtree(site / "test")
    assert len(load(site, options).train) == len(before.train)


def test_invisible_characters_do_not_tell_classes_apart(site: Path) -> None:
    add(site, "train/cat\u200b/1.png", "train/\u200b/1.png")
    assert sorted(f.code for f in examine(site, NODE).errors) == ["E09", "E12"]


def test_long_names_are_cut_in_messages(site: Path) -> None:
    add(site, f"train/{'x' * 200}/1.png")
    found = examine(site, NODE)
    assert all(len(str(finding)) < 400 for finding in found.findings)


def only(site: Path, options: FolderOptions = NODE) -> str:
    """The one thing that is wrong, without the place of the folder."""
    (found,) = examine(site, options).findings
    return str(found).replace(f"{site}", "SITE")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("Manifest.csv", "manifest.csv"),
        ("manifest.xlsx", "manifest.csv"),
        ("manifest.csv.txt", "manifest.csv"),
        ("classes.csv", "classes.txt"),
        ("Classes", "classes.txt"),
    ],
)
def test_a_misnamed_manifest_or_list_is_named(site: Path, name: str, right: str) -> None:
    (site / name).write_text("cat\ndog\n")
    saved = f'; save "{name}" as {right}'
    assert only(site) == f"W07 SITE: a file is not read{saved}"
    shutil.rmtree(site / "train")
    shutil.rmtree(site / "test", ignore_errors=True)
    expected = "expected train/<class>/, test/<class>/ or manifest.csv under SITE"
    assert only(site) == f"E02 {expected}{saved}"


def test_a_table_beside_the_manifest_made_of_it_is_no_fault(site: Path) -> None:
    (site / "classes.txt").write_text("cat\ndog\n")
    (site / "classes.xlsx").touch()
    assert examine(site, NODE).findings == ()


def test_a_misspelt_folder_is_named_and_what_is_none_is_not(site: Path) -> None:
    add(site, "val/cat/1.png", "Train/cat/3.png", ".cache/cat/1.png", "novel/yak/1.png")
    (site / "classes.txt").write_text("cat\ndog\n")
    (site / "notes.md").touch()
    assert only(site) == ('W07 SITE: not read: "Train", "val"; only train/, test/ and novel/ are')


def test_a_manifest_may_list_images_of_any_folder(site: Path) -> None:
    (site / "train").rename(site / "any")
    (site / "test").rename(site / "where")
    manifest(site, *(f"any/{name}/{n}.png,{name},train" for name in ("cat", "dog") for n in (1, 2)))
    assert examine(site, NODE).findings == ()


def test_both_files_of_a_picture_in_two_classes_are_named_in_whatever_part(site: Path) -> None:
    in_two_classes(site)
    assert only(site) == (
        'W08 SITE: the same picture in two classes: "train/cat/same.png" and "train/dog/1.png"; '
        "keep it in one"
    )
    (site / "novel/yak").mkdir(parents=True)
    (site / "novel/yak/1.png").write_bytes((site / "test/dog/9.png").read_bytes())
    assert '"test/dog/9.png" and "novel/yak/1.png"' in only(site)


def test_the_same_picture_twice_in_one_class_is_no_mistake(site: Path) -> None:
    (site / "train/dog/same.png").write_bytes((site / "train/dog/1.png").read_bytes())
    assert examine(site, NODE).findings == ()


def test_files_that_end_alike_and_begin_differently_are_two_pictures(site: Path) -> None:
    for name in ("cat", "dog"):
        (site / f"train/{name}/long.bmp").write_bytes(name.encode() + bytes(5000))
    assert "W08" not in codes(examine(site, NODE))


def test_files_of_kinds_that_are_not_read_are_counted_with_a_way_out(site: Path) -> None:
    for place in ("cat/a.HEIC", "cat/deep/b.heic", "cat/c.dcm", "cat/raw"):
        (site / "train" / place).parent.mkdir(exist_ok=True)
        (site / "train" / place).touch()
    assert only(site) == (
        "W09 SITE/train/cat: files that are not read: 1 without ending, 1 .dcm, 2 .heic; convert "
        "images to PNG or JPEG"
    )


def test_a_link_that_leads_nowhere_is_an_unreadable_image_and_not_nothing(site: Path) -> None:
    (site / "train/dog/more").symlink_to(site / "gone")
    (site / "train/owl").symlink_to(site / "gone")
    text = 'E06 SITE: 2 images cannot be used: "train/dog/more", "train/owl"; replace or remove '
    assert only(site) == f"{text}them, or set skip-bad (the first: a link that leads nowhere)"
    assert only(site, replace(NODE, skip_bad=True)).startswith("W03 SITE: 2 images left out")


def test_a_training_folder_that_is_a_link_to_nowhere_is_an_error(site: Path) -> None:
    (site / "train").rename(site / "moved")
    (site / "train").symlink_to(site / "gone")
    assert [finding.code for finding in examine(site, NODE).errors] == ["E01"]


def test_a_novel_class_that_is_trained_on_is_told_so(site: Path) -> None:
    add(site, "novel/dog/1.png")
    text = "a novel class must not be trained on; take it out of one of the two"
    assert only(site) == f'E09 SITE: class "dog" is in novel and in train or test; {text}'
    (site / "classes.txt").write_text("cat\ndog\tguide dog\n")  # trained on under another name
    assert only(site) == f'E09 SITE: class "dog" is in novel and in train or test; {text}'
    (site / "novel/dog").rename(site / "novel/emu")
    (site / "classes.txt").write_text("cat\ndog\nemu\n")
    assert only(site) == (
        f'E09 SITE: class "emu" is in novel and among the names that compete there; {text}'
    )


def test_one_folder_too_many_between_train_and_the_classes_is_guessed(tmp_path: Path) -> None:
    add(tmp_path, "train/images/cat/1.png", "train/images/dog/1.png", "test/images/dog/2.png")
    assert only(tmp_path).endswith('; if "cat", "dog" are the classes, move them one folder up')
    add(tmp_path, "train/images/1.png")
    assert only(tmp_path).endswith("set label-space to federation")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("dog;guide dog", 'put one TAB between folder and words, not as in "dog;guide dog"'),
        ("dog, guide dog", 'put one TAB between folder and words, not as in "dog, guide dog"'),
        ("dog guide dog", 'put one TAB between folder and words, not as in "dog guide dog"'),
        ("dog   guide dog", 'put one TAB between folder and words, not as in "dog   guide dog"'),
        ("train\\dog\tguide dog", 'write the folder\'s own name, not "train\\\\dog"'),
        ("train/dog", 'write the folder\'s own name, not "train/dog"'),
    ],
)
def test_the_likely_cause_of_a_missing_line_is_named(site: Path, line: str, hint: str) -> None:
    (site / "classes.txt").write_text(f"cat\n{line}\n")
    assert only(site).startswith('E04 SITE/classes.txt: no line for the class "dog"; add it')
    assert only(site).endswith(f"; {hint}")


def test_a_class_that_is_only_listed_is_known_to_the_check(site: Path) -> None:
    (site / "classes.txt").write_text("cat\nemu\tbig bird\ndog\n")
    assert examine(site, NODE).listed == ("emu",)
    federation = replace(NODE, label_space="federation", federation_classes=("cat", "dog", "owl"))
    assert examine(site, federation).listed == ()


def test_a_damaged_list_of_held_out_images_has_a_code(site: Path, tmp_path: Path) -> None:
    (tmp_path / "held.json").write_text("[]")
    found = examine(site, replace(NODE, holdout_file=tmp_path / "held.json"))
    assert [finding.code for finding in found.errors] == ["E13"]
