"""A site's folder: what is read, and one clear line for every common mistake."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from blend_core.config import Experiment, parse_experiment
from blend_core.data import ClientData, Preprocess, client_names, load_client_data
from blend_core.data.folders import FolderOptions, load_folder
from blend_core.data.store import ImageStore
from blend_core.errors import ConfigError, SiteError

PRE = Preprocess(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
TEMPLATE = "a photo of a {}."
NODE = FolderOptions("node", (), TEMPLATE)


def add(root: Path, *places: str, value: int = 100, size: tuple[int, int] = (8, 8)) -> None:
    """Write a small picture to each place below `root`."""
    for place in places:
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (value, value, value)).save(path)


def load(
    root: Path, space: str = "node", classes: tuple[str, ...] = (), template: str = TEMPLATE
) -> ClientData:
    return load_folder(root, PRE, FolderOptions(space, classes, template), ImageStore(10**6))


def refusal(root: Path, space: str = "node", classes: tuple[str, ...] = ()) -> str:
    """The text of the error that a folder ends in; always one line."""
    with pytest.raises(SiteError) as error:
        load(root, space, classes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    add(tmp_path, "train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "test/dog/9.png")
    return tmp_path


def test_images_labels_and_names_of_a_plain_site(site: Path) -> None:
    add(site, "test/cat/3.png", value=7)
    data = load(site)
    assert data.base_names == ("cat", "dog")
    assert data.new_names == ()
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test_base.labels.tolist() == [0, 1]
    assert int(data.test_base.images[0][0, 0, 0]) == 7
    assert len(data.test_new) == 0
    assert data.local_classes == {0, 1}


def test_files_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    for value, name in enumerate(("b", "a", "C")):
        add(tmp_path, f"train/cat/{name}.png", value=value)
    add(tmp_path, "train/dog/1.png")
    values = [int(image[0, 0, 0]) for image in load(tmp_path).train.images]
    assert values == [2, 1, 0, 100]  # code points: C, a, b


def test_test_images_are_prepared_and_training_images_kept_for_crops(site: Path) -> None:
    add(site, "train/cat/0.png", "test/cat/0.png", size=(60, 40))  # 4 x 8 is 32
    data = load(site)
    assert data.train.images[0].shape == (3, 32, 48)
    assert data.test_base.images[0].shape == (3, 8, 8)


def test_without_a_list_the_vocabulary_is_the_union_of_train_and_test(site: Path) -> None:
    add(site, "test/bee/1.png")
    data = load(site)
    assert data.base_names == ("bee", "cat", "dog")


def test_a_class_that_is_only_tested_counts_as_local(site: Path) -> None:
    add(site, "test/bee/1.png")
    assert load(site).local_classes == {0, 1, 2}  # PROTOCOL 7.2: a harder local task


def test_names_are_sorted_by_code_point_after_composition(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "été")
    add(tmp_path, f"train/{decomposed}/1.png", "train/zoo/1.png", "train/Zebra/1.png")
    add(tmp_path, "test/été/1.png")
    data = load(tmp_path)
    assert data.base_names == ("Zebra", "zoo", "été")
    assert data.test_base.labels.tolist() == [2]


def test_deeper_folders_belong_to_the_first_level(site: Path) -> None:
    add(site, "train/cat/2024/may/1.png", "train/cat/2023/1.png")
    data = load(site)
    assert data.base_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1]


def test_hidden_entries_leftovers_and_other_files_are_skipped(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(site, "train/.cache/1.png", "train/__MACOSX/1.png", "train/cat/__MACOSX/1.png")
    (site / "train/cat/._1.png").write_bytes(b"not an image")
    (site / "train/cat/Thumbs.db").touch()
    (site / "train/readme.txt").touch()
    data = load(site)
    assert data.base_names == ("cat", "dog")
    assert len(data.train) == 3
    assert "train/cat: files that are not read: 1 .db; convert" in caplog.text


def test_an_empty_class_folder_is_no_class_and_warned_about(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "train/emu").mkdir()
    (site / "train/cat_").mkdir()  # would collide if it counted
    with caplog.at_level(logging.WARNING):
        assert load(site).base_names == ("cat", "dog")
    assert "W01" in caplog.text
    assert "emu" in caplog.text


def test_a_test_class_without_training_images_is_warned_about(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(site, "test/bee/1.png")
    load(site)
    assert 'test classes without training images: "bee"' in caplog.text


def test_a_site_may_only_evaluate(tmp_path: Path) -> None:
    add(tmp_path, "test/cat/1.png", "test/dog/1.png")
    data = load(tmp_path)
    assert len(data.train) == 0
    assert data.train.labels.dtype == torch.int64
    assert data.local_classes == {0, 1}
    assert len(data.test_base) == 2


def test_a_site_may_have_no_test_images(tmp_path: Path) -> None:
    add(tmp_path, "train/cat/1.png", "train/dog/1.png")
    assert len(load(tmp_path).test_base) == 0


def test_novel_classes_compete_among_themselves(site: Path) -> None:
    add(site, "novel/yak/1.png", "novel/ant/1.png", "novel/yak/2.png")
    data = load(site)
    assert data.base_names == ("cat", "dog")
    assert data.new_names == ("ant", "yak")
    assert data.test_new.labels.tolist() == [0, 1, 1]


def test_names_with_underscores_are_stored_as_they_are(tmp_path: Path) -> None:
    add(tmp_path, "train/red_fox/1.png", "train/dog/1.png")
    assert load(tmp_path).base_names == ("dog", "red_fox")


def test_a_class_list_gives_names_order_and_distractors(site: Path) -> None:
    text = "\ufeff# our animals\r\ndog\tguide dog\r\n\r\n  emu \r\ncat\r\n"
    (site / "classes.txt").write_bytes(text.encode())
    data = load(site)
    assert data.base_names == ("guide dog", "emu", "cat")
    assert data.train.labels.tolist() == [2, 2, 0]


def test_one_class_with_a_distractor_can_train(tmp_path: Path) -> None:
    add(tmp_path, "train/cat/1.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert load(tmp_path).base_names == ("cat", "dog")


def test_federation_names_are_everybodys_and_matched_as_the_model_reads_them(
    tmp_path: Path,
) -> None:
    add(tmp_path, "train/red_fox/1.png", "train/k9/1.png")
    (tmp_path / "classes.txt").write_text("k9\tDog\n")
    data = load(tmp_path, "federation", ("cat", "dog", "Red Fox"))
    assert data.base_names == ("cat", "dog", "Red Fox")
    assert data.train.labels.tolist() == [1, 2]


def test_one_class_in_a_federation_can_train(tmp_path: Path) -> None:
    add(tmp_path, "train/cat/1.png")
    assert load(tmp_path, "federation", ("cat", "dog")).train.labels.tolist() == [0]


def test_e01_no_such_folder(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert refusal(missing) == f"E01 data directory {missing} not found; set data-dir"
    missing.touch()
    inside = missing / "none"
    assert refusal(inside) == f"E01 data directory {inside} not found; set data-dir"
    assert refusal(missing) == (
        f"E01 {missing} is a file; give the folder that holds train/ or manifest.csv"
    )


def test_e02_neither_train_nor_test(tmp_path: Path) -> None:
    expected = f"E02 expected train/<class>/, test/<class>/ or manifest.csv under {tmp_path}"
    add(tmp_path, "novel/cat/1.png")
    assert refusal(tmp_path) == expected
    add(tmp_path, "Train/cat/1.png")
    assert refusal(tmp_path) == f'{expected}; there are only "Train": rename or move them'
    add(tmp_path, "cat/1.png")
    assert refusal(tmp_path) == (
        f'{expected}; move the class folders ("cat") into {tmp_path}/train'
    )
    add(tmp_path, "photos/train/cat/1.png")
    assert refusal(tmp_path) == (
        f"{expected}; name the folder of one site instead, such as {tmp_path}/photos"
    )


@pytest.mark.parametrize("part", ["train", "test", "novel"])
def test_e03_images_outside_class_folders(site: Path, part: str) -> None:
    add(site, f"{part}/a.png", f"{part}/b.JPG")
    assert refusal(site) == (
        f"E03 {site / part}: 2 images lie directly in it; put each in a class folder"
    )


@pytest.mark.parametrize("place", ["train/cat/x.png", "train/owl", "novel", "classes.txt"])
def test_e05_a_link_out_of_the_data_directory(tmp_path: Path, place: str) -> None:
    add(tmp_path, "secret/a.png", "site/train/cat/1.png", "site/train/dog/1.png")
    is_file = "." in place
    target = tmp_path / "secret" / "a.png" if is_file else tmp_path / "secret"
    (tmp_path / "site" / place).symlink_to(target)
    text = refusal(tmp_path / "site")
    assert text.startswith(f"E05 {tmp_path / 'site' / place}: a link that leaves the data")


def test_links_within_the_data_directory_are_followed_even_in_circles(site: Path) -> None:
    (site / "train/cat/self").symlink_to(site / "train/cat")
    (site / "train/cat/3.png").symlink_to(site / "train/cat/1.png")
    assert load(site).train.labels.tolist() == [0, 0, 0, 1]


def test_a_data_directory_that_is_itself_a_link_is_fine(site: Path) -> None:
    link = site.parent / f"{site.name}-link"
    link.symlink_to(site)
    assert len(load(link).train) == 3


def test_e06_unreadable_images_are_counted_and_the_first_five_named(site: Path) -> None:
    for number in range(7):
        (site / f"train/cat/bad{number}.jpg").write_bytes(b"no image")
    (site / "test/dog/lost.png").symlink_to(site / "nowhere.png")
    text = refusal(site)
    assert text.startswith(f'E06 {site}: 8 images cannot be used: "train/cat/bad0.jpg", ')
    assert (
        '"train/cat/bad4.jpg" and 3 more; replace or remove them, or set skip-bad (the first: '
        in text
    )
    assert "bad5" not in text


def test_e06_a_single_one(site: Path) -> None:
    (site / "test/dog/loop.png").symlink_to(site / "test/dog/loop.png")
    assert refusal(site) == (
        f'E06 {site}: 1 image cannot be used: "test/dog/loop.png"; replace or remove it, '
        "or set skip-bad (the first: a link that leads nowhere)"
    )


def test_e07_a_single_class_has_nothing_to_learn(tmp_path: Path) -> None:
    add(tmp_path, "train/cat/1.png", "test/cat/1.png")
    text = refusal(tmp_path)
    assert text.startswith(f'E07 {tmp_path}: only one class ("cat")')
    assert "classes.txt" in text
    assert "label-space" in text


def test_e08_no_image_at_all(tmp_path: Path) -> None:
    (tmp_path / "train/cat").mkdir(parents=True)
    assert refusal(tmp_path).startswith(f"E08 {tmp_path}: no images in train or test; add")


@pytest.mark.parametrize(
    ("first", "second"),
    [("train/Red_Fox", "train/red fox"), ("train/Owl", "test/owl"), ("train/a", "train/ a")],
)
def test_e09_names_that_read_the_same(site: Path, first: str, second: str) -> None:
    add(site, f"{first}/1.png", f"{second}/1.png")
    text = refusal(site)
    assert text.startswith("E09 ")
    assert text.endswith("read the same to the model; merge or rename them")


def test_e09_in_a_class_list_and_between_novel_and_base(site: Path) -> None:
    add(site, "novel/Dog/1.png")
    assert refusal(site) == (
        f'E09 {site}/novel: classes "dog" and "Dog" read the same to the model; merge or rename '
        "them"
    )
    (site / "classes.txt").write_text("cat\tpet\ndog\tPet\n")
    assert refusal(site).startswith(f'E09 {site / "classes.txt"}: classes "pet" and "Pet"')
    (site / "classes.txt").write_text("cat\ndog\ncat\tkitty\n")
    assert refusal(site).startswith(f'E09 {site / "classes.txt"} line 3: "cat" occurs twice')


def test_e10_a_class_that_the_federation_does_not_have(site: Path) -> None:
    assert refusal(site, "federation", ("cat", "horse")) == (
        f'E10 {site}: class "dog" is not in the federation\'s class list (2 classes); rename or '
        "ask the operator"
    )
    assert '"cat", "dog" are not in' in refusal(site, "federation", ("owl", "horse"))


def test_e12_empty_names(site: Path) -> None:
    add(site, "train/_/1.png")
    assert refusal(site).startswith(f'E12 {site}: class name "_" is empty')
    (site / "classes.txt").write_text("cat\ndog\t \n")
    (site / "train/_/1.png").unlink()
    assert refusal(site).startswith(f"E12 {site / 'classes.txt'} line 2: ")


def test_e12_a_template_without_a_place_for_the_name(site: Path) -> None:
    with pytest.raises(SiteError, match=r"E12 prompt-template 'a photo' must contain \{\} exactly"):
        load(site, template="a photo")


def test_a_class_folder_missing_in_the_list_is_named(site: Path) -> None:
    (site / "classes.txt").write_text("cat\nemu\n")
    assert refusal(site) == (
        f'E04 {site / "classes.txt"}: no line for the class "dog"; add it, or remove the file to '
        "use the classes' own names"
    )


def test_a_class_list_in_another_encoding_is_named(site: Path) -> None:
    (site / "classes.txt").write_bytes("cat\ndog\n".encode("utf-16"))
    assert refusal(site) == f"E04 {site / 'classes.txt'}: not UTF-8 text; save it as UTF-8"


def test_the_operators_own_mistakes_are_not_blamed_on_the_site(site: Path) -> None:
    with pytest.raises(ConfigError, match=r'E09 data\.classes: classes "cat" and "Cat"'):
        load(site, "federation", ("cat", "Cat", "dog"))
    with pytest.raises(ConfigError, match="label-space = 'nodes': must be node or federation"):
        load(site, "nodes")


# Which sites an experiment has.


def experiment(clients: int = 2, **data: Any) -> Experiment:
    return parse_experiment({"clients": clients, "data": {"kind": "folders", **data}})


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for name in ("oslo", "Bern"):
        add(tmp_path, f"{name}/train/cat/1.png", f"{name}/train/dog/1.png")
    add(tmp_path, ".trash/train/cat/1.png", "notes/1.png")
    return tmp_path


def test_sites_are_the_sorted_sub_folders_with_images(sites: Path) -> None:
    assert client_names(experiment(root=str(sites))) == ["Bern", "oslo"]


def test_without_a_root_sites_bring_their_own_folder() -> None:
    assert client_names(experiment()) is None


def test_a_wrong_number_of_clients_names_the_fix(sites: Path) -> None:
    with pytest.raises(ConfigError) as error:
        client_names(experiment(clients=10, root=str(sites)))
    assert str(error.value) == (
        f"data.root {sites} holds 2 sites but clients = 10; set clients=2 "
        "(without train/, test/ and manifest.csv, hence no sites: notes)"
    )


def test_a_missing_or_empty_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.root .*none is not a folder"):
        client_names(experiment(root=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="holds no site"):
        client_names(experiment(root=str(tmp_path)))


@pytest.mark.parametrize("name", ["site a", "-x", "é", "x" * 65])
def test_a_folder_that_cannot_name_a_client_is_named(sites: Path, name: str) -> None:
    add(sites, f"{name}/train/cat/1.png")
    with pytest.raises(ConfigError, match="must be 1 to 64 letters") as error:
        client_names(experiment(clients=3, root=str(sites)))
    assert repr(name) in str(error.value)


def test_a_site_reads_its_own_folder_and_never_one_that_the_server_names(sites: Path) -> None:
    own = load_client_data(experiment(), "any", 1, sites / "oslo", NODE, PRE, 1.0)
    assert own.base_names == ("cat", "dog")
    assert len(own.train) == 2
    with pytest.raises(SiteError, match="no data directory"):
        load_client_data(experiment(root=str(sites)), "oslo", None, None, NODE, PRE, 1.0)


def test_a_site_without_a_folder_is_told_what_to_set() -> None:
    with pytest.raises(SiteError, match=r"E01 oslo: no data directory; set data-dir"):
        load_client_data(experiment(), "oslo", None, None, NODE, PRE, 1.0)


def test_impossible_label_spaces_are_refused(sites: Path) -> None:
    for space, message in (("federation", r"needs data\.classes"), ("nodes", "must be node or")):
        options = FolderOptions(space, (), TEMPLATE)
        with pytest.raises(ConfigError, match=message):
            load_client_data(experiment(), "oslo", None, sites / "oslo", options, PRE, 1.0)
