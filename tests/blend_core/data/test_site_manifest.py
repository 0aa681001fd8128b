"""A site that lists its images in manifest.csv."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from blend_core.data import Preprocess
from blend_core.data.findings import Finding
from blend_core.data.folders import FolderOptions, examine, load_folder
from blend_core.data.listing import SiteImage
from blend_core.data.site_manifest import read_manifest
from blend_core.data.store import ImageStore

HEADER = "path,label,split\n"


def read(folder: Path, text: str | bytes) -> tuple[list[SiteImage], list[SiteImage], list[str]]:
    """Images of train and test, and what was found, without the folder's own name."""
    data = text.encode() if isinstance(text, str) else text
    (folder / "manifest.csv").write_bytes(data)
    findings: list[Finding] = []
    train, test = read_manifest(folder, findings)
    return train, test, [str(f).replace(f"{folder}/", "") for f in findings]


def test_images_are_sorted_by_class_and_path_and_not_by_line(tmp_path: Path) -> None:
    train, test, findings = read(
        tmp_path, HEADER + "b.png,dog,train\na.png,dog,train\nc.png,cat,train\n./d//e.png,cat,test"
    )
    assert train == [
        SiteImage("c.png", "cat"),
        SiteImage("a.png", "dog"),
        SiteImage("b.png", "dog"),
    ]
    assert test == [SiteImage("d/e.png", "cat")]
    assert findings == []


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_files_of_all_systems_are_read(tmp_path: Path, mark: bytes, end: str) -> None:
    lines = [
        "path,label,split,domain",
        "",
        '"a,b.png","left, or ""right""/both",train,Foto',
        "c.png, 狐狸 , test ,",
    ]
    train, test, findings = read(tmp_path, mark + end.join(lines).encode())
    assert train == [SiteImage("a,b.png", 'left, or "right"/both', "Foto")]
    assert test == [SiteImage("c.png", "狐狸")]
    assert findings == []


def test_labels_are_composed_so_that_accents_are_one_class(tmp_path: Path) -> None:
    train, _, _ = read(tmp_path, HEADER + "a.png,cafe\u0301,train\nb.png,caf\u00e9,train\n")
    assert {image.class_name for image in train} == {"caf\u00e9"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'line 1: the header must be path,label,split or path,label,split,domain, not ""'),
        ("\ufeff", "line 1: the header must be"),
        (
            "path;label;split\n",
            'not "path;label;split"; separate columns by commas, not semicolons',
        ),
        (
            "path\tlabel\tsplit\n",
            'not "path\\tlabel\\tsplit"; separate columns by commas, not TABs',
        ),
        (
            HEADER + "any\\a.png,cat,train\n",
            'line 2: path "any\\\\a.png" has backslashes; write "/"',
        ),
        (
            HEADER + "a.png,yak,novel\n",
            'split "novel" is not train or test; put novel classes into novel/<class>/',
        ),
        ("path,label\n", 'not "path,label"'),
        ("Path,Label,Split\n", 'not "Path,Label,Split"'),
        ("\n\npath,split,label\n", "line 3: the header must be"),
        (HEADER + "a.png,cat,train\nb.png,cat,tran\n", 'line 3: split "tran" is not train or test'),
        (HEADER + "a.png,,train\n", "line 2: the label is empty"),
        (HEADER + "a.png,  ,train\n", "line 2: the label is empty"),
        (HEADER + ",cat,train\n", "line 2: the path is empty"),
        (HEADER + "a.png,cat\n", "line 2: 2 columns, the header has 3"),
        (HEADER + "a.png,cat, grey,train\n", "4 columns, the header has 3; put a text with commas"),
        (
            HEADER + '"a\nb.png",cat,train\nc.png,cat,train\n./c.png,dog,test\n',
            'line 5: path "c.png" is on line 4 already; remove one',
        ),
        (HEADER + 'a.png,"cat,train\n', "line 2: unexpected end of data; check the quotes"),
        (HEADER + "a\0.png,cat,train\n", "line 2: a NUL character"),
    ],
)
def test_e04_names_the_line_and_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    _, _, (finding,) = read(tmp_path, text)
    assert finding.startswith("E04 manifest.csv line ")
    assert message in finding


def test_a_file_whose_name_has_a_backslash_is_read(tmp_path: Path) -> None:
    (tmp_path / "a\\b.png").touch()
    train, _, findings = read(tmp_path, HEADER + "a\\b.png,cat,train\n")
    assert (train, findings) == ([SiteImage("a\\b.png", "cat")], [])


def test_e04_another_encoding_or_no_file_at_all(tmp_path: Path) -> None:
    for data in (HEADER.encode("utf-16"), HEADER.encode() + b"\xe9.png,cat,train\n"):
        assert read(tmp_path, data)[2] == [
            "E04 manifest.csv: not UTF-8 text; save it as CSV in UTF-8"
        ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.csv").mkdir()
    findings: list[Finding] = []
    read_manifest(tmp_path / "other", findings)
    assert str(findings[0]).endswith(
        "manifest.csv: cannot be read: Is a directory; mend or remove it"
    )


def test_every_wrong_line_is_named(tmp_path: Path) -> None:
    train, _, findings = read(tmp_path, HEADER + "a.png,,train\nb.png,cat,x\nc.png,cat,train\n")
    assert [finding.split(":")[0] for finding in findings] == [
        "E04 manifest.csv line 2",
        "E04 manifest.csv line 3",
    ]
    assert len(train) == 1


@pytest.mark.parametrize("path", ["/etc/a.png", "../a.png", "a/../../b.png", "C:\\a.png"])
def test_e05_a_path_that_leaves_the_folder(tmp_path: Path, path: str) -> None:
    train, _, (finding,) = read(tmp_path, HEADER + f"{path},cat,train\n")
    assert finding.startswith("E05 manifest.csv line 2: path ")
    assert "leaves the data directory" in finding
    assert train == []


@pytest.mark.parametrize("path", ["out/a.png", "a.png"])
def test_e05_a_link_that_leaves_the_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "a.png").touch()
    site = tmp_path / "site"
    site.mkdir()
    (site / path.split("/")[0]).symlink_to(tmp_path / "secret" / path.removeprefix("out/"))
    if "/" in path:
        (site / "out").unlink()
        (site / "out").symlink_to(tmp_path / "secret")
    _, _, (finding,) = read(site, HEADER + f"{path},cat,train\n")
    assert finding == f"E05 {path}: a link that leaves the data directory; copy the images into it"


NODE = FolderOptions("node", (), "a {}.")


def test_the_manifest_wins_over_class_folders_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place in ("train/owl/1.png", "test/owl/1.png", "any/1.png", "any/2.png", "novel/yak/1.png"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (len(place), ord(place[0]), ord(place[-5]))).save(
            tmp_path / place
        )
    (tmp_path / "manifest.csv").write_text(
        HEADER + "any/1.png,cat / dog,train\nany/2.png,bird,train\ntrain/owl/1.png,bird,test\n"
    )
    data = load_folder(tmp_path, Preprocess(8, (0, 0, 0), (1, 1, 1)), NODE, ImageStore(10**6))
    assert data.base_names == ("bird", "cat / dog")
    assert data.train.labels.tolist() == [0, 1]
    assert data.test_base.labels.tolist() == [0]
    assert data.new_names == ("yak",)
    assert "manifest.csv counts, class folders in train/ and test/ do not" in caplog.text


def test_missing_images_and_other_things_are_bad_images(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "manifest.csv").write_text(
        HEADER + "gone.png,cat,train\nx.png,dog,train\nnotes.txt,dog,test\n"
    )
    (found,) = examine(tmp_path, NODE).findings
    assert str(found).startswith(
        f'E06 {tmp_path}: 3 images cannot be used: "gone.png", "x.png", "notes.txt"; replace'
    )


def test_e08_a_manifest_without_images(tmp_path: Path) -> None:
    (tmp_path / "manifest.csv").write_text(HEADER)
    (found,) = examine(tmp_path, NODE).findings
    assert str(found) == f"E08 {tmp_path}: no images in train or test; list images in manifest.csv"


def test_domains_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        Image.new("RGB", (40, 40), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    (tmp_path / "manifest.csv").write_text(
        "path,label,split,domain\na.png,x,train,photo\nb.png,y,train,photo\nc.png,y,test,sketch\n"
    )
    assert examine(tmp_path, NODE).domains == {"photo": 2, "sketch": 1}
