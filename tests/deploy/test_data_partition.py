"""`blend data partition`: what a newcomer reads, and what is left behind where it fails."""

from __future__ import annotations

import json
import random

import pytest
from imitations import write_coop, write_domains

from blend_core.data.datasets import file_sha256, read_dataset


def test_a_refused_partition_leaves_no_folder_behind(blend, tmp_path):
    for refused in ("data.kind=folders", "data.kind=dtd", "data.alpha=wide"):
        code, _, errors = blend("data", "partition", "--set", refused, "--out", "some/where")
        assert (code, errors.count("\n")) == (2, 1)
        assert not list(tmp_path.iterdir())


def test_a_folder_with_a_partition_is_kept_and_one_that_cannot_be_is_named(blend, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "partition.png").write_bytes(b"mine")
    code, output, errors = blend("data", "partition", "--out", "used")
    assert (code, output) == (2, "")
    assert errors == "error: --out used: has a partition.png already; name another folder\n"
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["partition.png"]
    (tmp_path / "file").touch()
    code, _, errors = blend("data", "partition", "--out", "file/in")
    assert (code, errors) == (
        2,
        "error: --out file/in: Not a directory; name a folder you may write\n",
    )


@pytest.mark.parametrize("command", ["partition", "make-split"])
def test_the_help_says_what_the_argument_is(blend, command):
    code, output, _ = blend("data", command, "--help")
    assert code == 0
    said = {"partition": "CONFIG is the name of a preset or a YAML file; without it: quickstart."}
    assert said.get(command, "KIND is the data set, e.g. dtd.") in " ".join(output.split())


@pytest.fixture
def dtd(tmp_path) -> tuple[str, ...]:
    """Settings of a data set with 24 base classes; images are not looked for."""
    write_coop(tmp_path / "data", "dtd")
    return ("--set", "data.kind=dtd", "--set", "data.root=data")


def test_test_images_that_are_training_images_are_named(blend, tmp_path):
    write_domains(tmp_path / "data", "office31")
    dataset = read_dataset("office31", tmp_path / "data")
    for record in (*dataset.train, *dataset.test):
        (tmp_path / "data" / record.path).unlink()
        (tmp_path / "data" / record.path).write_text(record.path)
    given = ("--set", "data.kind=office31", "--set", "data.root=data", "--set", "clients=3")
    assert "warning" not in blend("data", "partition", *given)[1]
    trained, tested = dataset.train[5].path, dataset.test[2].path
    (tmp_path / "data" / tested).write_text(trained)
    code, output, _ = blend("data", "partition", *given)
    assert code == 0
    said = f"warning: 1 test image is a training image, too, e.g. {tested} is {trained}; scores"
    assert said in output


def test_every_line_fits_a_terminal_and_equal_numbers_are_said_once(blend, dtd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rule = ("--set", "data.partition=iid", "--set", "data.fewshot_seed=123456789")
    seeds = ("--set", "data.partition_seed=123456789", "--set", "clients=4")
    code, output, _ = blend("data", "partition", *dtd, *rule, *seeds, "--out", "part")
    assert code == 0
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "few-shot seed 123456789, partition seed 123456789" in " ".join(output.split())
    # 24 classes of 16 images, evenly to four clients.
    assert "4 clients, 384 training images" in lines
    assert "a client: 96 training images, median 96; 24 classes" in lines


def test_the_median_of_an_even_number_of_clients_lies_between_the_middle_two(blend, dtd, tmp_path):
    rule = ("--set", "data.partition=disjoint", "--set", "clients=16", "--set", "data.shots=1")
    code, output, _ = blend("data", "partition", *dtd, *rule, "--out", "part")
    assert code == 0
    # 24 classes over 16 clients: eight have two, eight one, and an image of each.
    clients = json.loads((tmp_path / "part" / "manifest.json").read_text())["clients"]
    assert sorted(len(client["train"]) for client in clients) == [1] * 8 + [2] * 8
    assert "a client: 1 to 2 training images, median 1.5; 1 to 2 classes" in output.splitlines()


def test_pfedmmas_own_partition_has_the_classes_of_the_released_code(blend, dtd, tmp_path):
    own = ("data.partition=disjoint", "data.partition_seed=2023", "data.blocks=round")
    settings = [x for setting in own for x in ("--set", setting)]
    code, _, _ = blend("data", "partition", "pfedmma", *dtd, *settings, "--out", "part")
    assert code == 0
    clients = json.loads((tmp_path / "part" / "manifest.json").read_text())["clients"]
    # By the released rule: round(24 / 10) = 2 classes of the shuffled 24 each, the last has 6.
    shuffled = list(range(24))
    random.Random(2023).shuffle(shuffled)
    ends = [*range(2, 20, 2), 24]
    blocks = [sorted(shuffled[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert [client["classes"] for client in clients] == blocks
    assert [len(client["train"]) for client in clients] == [32] * 9 + [96]
    assert {client["test"] for client in clients} == {"held-classes"}


def test_a_split_that_was_made_here_is_told(blend, dtd, tmp_path):
    said = (
        "warning: a split of your own (blend data make-split): "
        "not comparable with the papers' numbers\n"
    )
    assert said not in blend("data", "partition", *dtd)[1]
    split = tmp_path / "data" / "dtd" / "split_zhou_DescribableTextures.json"
    note = {"seed": 3, "sha256": file_sha256(split)}  # As make-split leaves it.
    split.with_suffix(".made.json").write_text(json.dumps(note))
    code, output, _ = blend("data", "partition", *dtd)
    assert code == 0
    assert said in output
