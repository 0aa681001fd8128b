"""`blend data check`: what the owner of a folder sees, and how it ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from blend_core.errors import ConfigError
from deploy.data_check import check

app = typer.Typer()
app.command()(check)


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output; errors of usage that `blend` itself reports are raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    for number, place in enumerate(
        ("train/cat/1", "train/cat/2", "train/dog/1", "train/dog/2", "test/cat/3")
    ):
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (number, 0, 0)).save(site / f"{place}.png")
    return site


def test_a_good_folder_ends_with_its_counts_and_0(site: Path) -> None:
    code, output = run(site)
    assert code == 0
    rows = [line.replace("│", " ").split() for line in output.splitlines()]
    assert ["cat", "2", "1"] in rows
    assert ["dog", "2", "0"] in rows
    assert ["all", "4", "1"] in rows
    assert output.splitlines()[-3:] == [
        "fit to join",
        "no images in novel/<class>/: Gen. is not measured",
        "prompts were checked for ViT-B-16-quickgelu (--backbone)",
    ]


def test_errors_come_first_and_end_with_1(site: Path) -> None:
    (site / "train/owl").mkdir()
    (site / "train/cat/bad.png").write_bytes(b"")
    name = "x" * 400
    (site / "classes.txt").write_text(f"cat\ndog\t{name}\n")
    code, output = run(site)
    assert code == 1
    lines = output.splitlines()
    starts = [line.split()[:2] for line in lines if line.startswith(("error: ", "warning: "))]
    assert starts == [["error:", "E06"], ["error:", "E11"], ["warning:", "W01"]]
    assert lines[-1] == "not fit: 2 errors"


def test_lines_of_a_wrong_manifest_do_not_flood_the_screen(site: Path) -> None:
    rows = "".join(f"{n}.png,cat,tran{n}\n" for n in range(1000))
    rows += "a.png,,train\n"
    (site / "manifest.csv").write_text("path,label,split\n" + rows)
    code, output = run(site)
    assert code == 1
    assert output.count("error: E04") == 5
    assert "error: E04 ... and 997 more like this\n" in output
    assert "line 1002: the label is empty" in " ".join(output.split())
    assert output.endswith("not fit: 1001 errors\n")


def test_domains_of_a_manifest_are_counted(site: Path) -> None:
    rows = "train/cat/1.png,cat,train,photo\ntrain/dog/1.png,dog,train,sketch\n"
    (site / "manifest.csv").write_text(f"path,label,split,domain\n{rows}")
    assert "domains: photo 1, sketch 1\n" in run(site)[1]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    code, output = run(tmp_path / "none")
    assert code == 1
    words = " ".join(output.split())
    assert f"error: E01 data directory {tmp_path / 'none'} not found; set data-dir" in words


def test_options_turn_errors_into_warnings_and_back(site: Path) -> None:
    (site / "test/cat/same.png").write_bytes((site / "train/cat/1.png").read_bytes())
    (site / "train/cat/bad.png").write_bytes(b"")
    assert run(site)[0] == 1
    code, output = run(site, "--skip-bad")
    assert code == 0
    assert "warning: W03" in output
    assert "warning: W04" in output
    code, output = run(site, "--skip-bad", "--strict")
    assert code == 1
    assert "error: W04" in output


def test_a_federations_list_is_read_from_a_file(site: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("# ours\r\nCat\r\n\r\nOwl\r\n")
    code, output = run(site, "--classes", names)
    assert code == 1
    assert " E10 " in " ".join(output.split())
    names.write_text("Cat\nOwl\nDog\n")
    assert run(site, "--classes", names)[0] == 0


def test_what_a_site_cannot_do_is_said(site: Path) -> None:
    (site / "test").rename(site / "later")
    assert "without test images (see --holdout)" in run(site)[1]
    (site / "train").rename(site / "test")
    assert "fit to join, only to evaluate: there are no training images\n" in run(site)[1]


def test_holdout_is_shown_and_nothing_is_written(site: Path) -> None:
    (site / "test").rename(site / "later")
    for number in range(3, 11):
        Image.new("RGB", (40, 40), (number * 9, 0, 0)).save(site / f"train/cat/{number}.png")
    before = sorted(site.rglob("*"))
    code, output = run(site, "--holdout", "0.2")
    assert code == 0
    assert ["cat", "8", "2"] in [line.replace("│", " ").split() for line in output.splitlines()]
    assert sorted(site.rglob("*")) == before


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--classes", "none.txt", "--classes none.txt: No such file"),
        ("--backbone", "ViT-X", "ViT-X"),
    ],
)
def test_wrong_usage_is_no_fault_of_the_folder(
    site: Path, option: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(site, option, value)


def test_a_federations_list_needs_names_that_differ(site: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    for text, message in (("cat\n", "at least two names"), ("cat\nCat\n", r"E09 data\.classes")):
        names.write_text(text)
        with pytest.raises(ConfigError, match=message):
            run(site, "--classes", names)


def test_the_table_fits_80_columns_and_names_cannot_change_the_terminal(site: Path) -> None:
    (site / "train/cat").rename(site / "train" / ("long name " * 20).strip())
    (site / "train/dog").rename(site / "train" / "dog\x1b[31m")
    (site / "novel").mkdir()
    (site / "test/cat").rename(site / "novel/狐狸")
    code, output = run(site)
    assert code == 0
    table = output[: output.index("fit to join")].splitlines()
    assert max(map(len, (line for line in table if "│" in line))) <= 80
    assert "\x1b" not in output


def test_all_sites_are_checked_although_the_first_is_not_fit(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "second")
    shutil.copytree(site, tmp_path / "third")
    (site / "train/cat/bad.png").write_bytes(b"")
    (tmp_path / "third/train/1.png").write_bytes(b"")
    code, output = run(site, tmp_path / "second", tmp_path / "third")
    assert code == 1
    assert [line for line in output.splitlines() if "fit" in line.split(":")[0]] == [
        "not fit: 1 error",
        "fit to join",
        "not fit: 1 error",
        "1 of 3 sites are fit to join",
    ]
    assert "E06" in output
    assert "E03" in output
    assert run(tmp_path / "second", tmp_path / "second")[0] == 0


def test_a_listed_name_without_images_is_in_the_table(site: Path) -> None:
    (site / "classes.txt").write_text("cat\ndog\nemu\tbig bird\n")
    code, output = run(site)
    assert code == 0
    assert ["emu", "0", "0"] in [line.replace("│", " ").split() for line in output.splitlines()]
    assert "in classes.txt without images, but competing: emu\n" in output


def test_text_fits_80_columns_where_words_do(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "train/cat/bad.png").write_bytes(b"")
    (site / "test/cat/same.png").write_bytes((site / "train/cat/1.png").read_bytes())
    (site / "Train").mkdir()
    monkeypatch.chdir(site)
    for options in ([], ["--skip-bad"]):
        code, output = run(".", *options)
        assert code == (0 if options else 1)
        assert "W04" in output
        assert max(map(len, output.splitlines())) <= 80
