"""A split that is made on request: CoOp's shares, a recorded seed, and nothing overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from imitations import patch_description
from scipy.io import savemat

from blend_core.data.datasets import file_sha256, read_dataset
from blend_core.data.make_split import make_split
from blend_core.errors import ConfigError, SiteError


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def split(path: Path) -> dict[str, list[list]]:
    content: dict[str, list[list]] = json.loads(path.read_text())
    return content


def names(content: dict[str, list[list]]) -> dict[int, str]:
    return {label: name for part in content.values() for _, label, name in part}


@pytest.fixture
def textures(tmp_path: Path) -> Path:
    for k in ("banded", "polka-dotted"):
        touch(tmp_path / "dtd" / "images" / k, *(f"{i}.jpg" for i in range(10)), ".hidden.jpg")
    return tmp_path


def test_half_trains_a_fifth_validates_and_the_rest_tests(textures: Path, monkeypatch) -> None:
    path = make_split("dtd", textures, 3)
    content = split(path)
    for label in (0, 1):
        counts = [sum(e[1] == label for e in content[p]) for p in ("train", "val", "test")]
        assert counts == [5, 2, 3]
    assert names(content) == {0: "banded", 1: "polka-dotted"}
    record = json.loads(path.with_suffix(".made.json").read_text())
    assert record["seed"] == 3
    assert record["sha256"] == file_sha256(path)
    counts = {"train": 10, "val": 4, "test": 6}
    patch_description(monkeypatch, "dtd", classes=2, counts=counts)
    dataset = read_dataset("dtd", textures)
    assert len(dataset.train) == 10
    assert not dataset.published
    path.write_text(path.read_text() + " ")
    with pytest.raises(SiteError, match=r"remove split_zhou_\w+\.made\.json if the split file is"):
        read_dataset("dtd", textures)
    path.with_suffix(".made.json").unlink()
    assert read_dataset("dtd", textures).published


def test_the_seed_decides_and_zero_is_one(textures: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        path = make_split("dtd", textures, seed)
        found.append(path.read_text())
        path.unlink()
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_an_existing_split_is_left_alone(textures: Path) -> None:
    path = textures / "dtd" / "split_zhou_DescribableTextures.json"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        make_split("dtd", textures, 0)
    assert path.read_text() == "mine"


def test_what_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cifar10 needs no split to be made; these may: caltech"):
        make_split("cifar10", tmp_path, 0)
    with pytest.raises(ConfigError, match="no data set"):
        make_split("mnist", tmp_path, 0)
    with pytest.raises(SiteError, match=r"eurosat/2750 is missing"):
        make_split("eurosat", tmp_path, 0)


def test_odd_sources_write_nothing(tmp_path: Path) -> None:
    touch(tmp_path / "dtd" / "images")
    with pytest.raises(SiteError, match="no images were found"):
        make_split("dtd", tmp_path, 0)
    pets = tmp_path / "oxford_pets"
    touch(pets / "images")
    (pets / "annotations").mkdir()
    for label, message in (("0", r"its label \(0\) or name"), ("9" * 5000, "are damaged")):
        for name in ("trainval.txt", "test.txt"):
            (pets / "annotations" / name).write_text(f"Abyssinian_1 {label} 1 1\n")
        with pytest.raises(SiteError, match=message):
            make_split("oxford_pets", tmp_path, 0)
    assert not list(tmp_path.rglob("split*"))


def test_caltech_renames_and_leaves_out_but_labels_follow_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "caltech-101" / "101_ObjectCategories"
    for name in ("Faces", "Faces_easy", "Leopards", "Motorbikes", "BACKGROUND_Google", "airplanes"):
        touch(folder / name, *(f"image_{i:04d}.jpg" for i in range(4)))
    found = names(split(make_split("caltech101", tmp_path, 0)))
    assert found == {0: "face", 1: "leopard", 2: "motorbike", 3: "airplane"}


def test_eurosat_gets_its_new_names_once(tmp_path: Path) -> None:
    for name in ("AnnualCrop", "Forest", "Sea or Lake"):
        touch(tmp_path / "eurosat" / "2750" / name, *(f"{i}.jpg" for i in range(5)))
    found = names(split(make_split("eurosat", tmp_path, 0)))
    assert found == {0: "Annual Crop Land", 1: "Forest", 2: "Sea or Lake"}


def test_pets_keep_their_test_list_and_give_a_fifth_for_validation(tmp_path: Path) -> None:
    folder = tmp_path / "oxford_pets"
    touch(folder / "images")
    lines = [
        f"{n}_{i} {k} 1 1\n"
        for k, n in ((1, "Abyssinian"), (2, "american_bulldog"))
        for i in range(10)
    ]
    (folder / "annotations").mkdir()
    (folder / "annotations" / "trainval.txt").write_text("".join(lines))
    (folder / "annotations" / "test.txt").write_text("Abyssinian_77 1 1 1\n")
    content = split(make_split("oxford_pets", tmp_path, 0))
    assert [len(content[part]) for part in ("train", "val", "test")] == [16, 4, 1]
    assert content["test"] == [["Abyssinian_77.jpg", 0, "abyssinian"]]
    assert names(content)[1] == "american_bulldog"


def test_cars_say_the_year_first(tmp_path: Path) -> None:
    folder = tmp_path / "stanford_cars"
    touch(folder / "devkit")
    savemat(
        folder / "devkit" / "cars_meta.mat",
        {"class_names": np.array([["Audi TTS Coupe 2012", "AM General Hummer SUV 2000"]], object)},
    )
    annotations = np.zeros((1, 5), dtype=[("fname", object), ("class", object)])
    for i in range(5):
        annotations[0, i] = (f"{i:05d}.jpg", np.array([[1 + i // 4]]))
    savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": annotations})
    savemat(folder / "cars_test_annos_withlabels.mat", {"annotations": annotations[:, 4:]})
    content = split(make_split("stanford_cars", tmp_path, 0))
    assert names(content) == {0: "2012 Audi TTS Coupe", 1: "2000 AM General Hummer SUV"}
    assert content["test"] == [["cars_test/00004.jpg", 1, "2000 AM General Hummer SUV"]]
    assert {e[0].split("/")[0] for e in content["train"]} == {"cars_train"}


def test_flowers_are_named_by_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "oxford_flowers"
    touch(folder / "jpg")
    savemat(folder / "imagelabels.mat", {"labels": np.array([[2, 1, 1, 1, 1, 1]])})
    (folder / "cat_to_name.json").write_text(json.dumps({"1": "pink primrose", "2": "rose"}))
    content = split(make_split("oxford_flowers", tmp_path, 0))
    assert names(content) == {0: "pink primrose", 1: "rose"}
    everything = sorted(e for part in content.values() for e in part)
    assert everything[0] == ["image_00001.jpg", 1, "rose"]
    (folder / "imagelabels.mat").write_bytes(b"no")
    (folder / "split_zhou_OxfordFlowers.json").unlink()
    with pytest.raises(SiteError, match=r"imagelabels\.mat and cat_to_name\.json cannot be read"):
        make_split("oxford_flowers", tmp_path, 0)


def test_sun_reads_its_paths_backwards(tmp_path: Path) -> None:
    folder = tmp_path / "sun397"
    touch(folder / "SUN397")
    (folder / "ClassName.txt").write_text("/a/abbey\n/i/ice_skating_rink/outdoor\n")
    rink = "".join(f"/i/ice_skating_rink/outdoor/sun_{i}.jpg\n" for i in range(5))
    (folder / "Training_01.txt").write_text(rink + "/a/abbey/sun_1.jpg\n")
    (folder / "Testing_01.txt").write_text("/a/abbey/sun_2.jpg\n")
    content = split(make_split("sun397", tmp_path, 0))
    assert names(content) == {0: "abbey", 1: "outdoor ice_skating_rink"}
    assert content["test"] == [["a/abbey/sun_2.jpg", 0, "abbey"]]
    assert len(content["val"]) == 1


def test_actions_are_split_at_their_capitals_and_videos_keep_their_spelling(tmp_path: Path) -> None:
    folder = tmp_path / "ucf101"
    touch(folder / "UCF-101-midframes")
    lists = folder / "ucfTrainTestlist"
    lists.mkdir()
    (lists / "classInd.txt").write_text("1 ApplyEyeMakeup\n2 HandstandPushups\n")
    video = "HandstandPushups/v_HandStandPushups_g08_c0{}.avi"
    (lists / "trainlist01.txt").write_text("".join(f"{video.format(i)} 2\n" for i in range(5)))
    (lists / "testlist01.txt").write_text("ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi\n")
    content = split(make_split("ucf101", tmp_path, 0))
    assert content["test"] == [
        ["Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg", 0, "Apply_Eye_Makeup"]
    ]
    assert content["val"][0][0].startswith("Handstand_Pushups/v_HandStandPushups_g08_c0")
