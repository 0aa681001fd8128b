"""`manifest.csv`: the table in which a site may list its images instead of sorting them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from blend_core.data.findings import Finding, error
from blend_core.data.listing import SiteImage, is_inside
from blend_core.data.vocabulary import quoted, read_regular
from blend_core.names import composed

__all__ = ["MANIFEST", "read_manifest"]

MANIFEST = "manifest.csv"

_HEADERS = (["path", "label", "split"], ["path", "label", "split", "domain"])


def read_manifest(
    data_dir: Path, findings: list[Finding]
) -> tuple[list[SiteImage], list[SiteImage]]:
    """Read the images of train and test (PROTOCOL 7.1).

    The file is UTF-8 with or without a byte order mark; texts with commas, quotes or line ends
    stand in double quotes. Paths count from the file and have "/" between folders. Blanks around
    a label, split or domain do not count; blank lines are skipped.

    Args:
        data_dir: the folder that holds it.
        findings: receives E04 and E05, with the number of the line.

    Returns:
        Images of train and of test, by class and path, both sorted by code point.
    """
    file, real_root = data_dir / MANIFEST, os.path.realpath(data_dir)
    if not is_inside(file, real_root, findings):
        return [], []
    text = _text(file, findings)
    if text is None:
        return [], []
    rows = _rows(text, file, findings)
    number, header = next(rows, (1, []))
    if header not in _HEADERS:
        findings.append(
            error(
                "E04",
                f"{file} line {number}: the header must be path,label,split or "
                f"path,label,split,domain, not {quoted([','.join(header)])}{_separator(header)}",
            )
        )
        return [], []
    images: dict[str, list[SiteImage]] = {"train": [], "test": []}
    lines: dict[str, int] = {}
    for number, row in rows:
        where = f"{file} line {number}"
        wrong = _wrong(row, len(header))
        if wrong:
            findings.append(error("E04", f"{where}: {wrong}"))
            continue
        path = row[0]
        label, split, domain = (composed(part.strip()) for part in (*row[1:], "")[:3])
        if PurePosixPath(path).is_absolute() or ".." in path.split("/") or _has_drive(path):
            text = f"{where}: path {quoted([path])} leaves the data directory; use one below it"
            findings.append(error("E05", text))
            continue
        if "\\" in path and not os.path.lexists(data_dir / path):
            text = f'{where}: path {quoted([path])} has backslashes; write "/" between folders'
            findings.append(error("E04", text))
            continue
        path = str(PurePosixPath(path))  # "./a.png" is "a.png"
        if path in lines:
            text = f"{where}: path {quoted([path])} is on line {lines[path]} already; remove one"
            findings.append(error("E04", text))
            continue
        lines[path] = number
        if is_inside(data_dir / path, real_root, findings):
            images[split].append(SiteImage(path, label, domain or None))
    train, test = (
        sorted(part, key=lambda image: (image.class_name, image.path)) for part in images.values()
    )
    return train, test


def _text(file: Path, findings: list[Finding]) -> str | None:
    try:
        text = read_regular(file)
    except UnicodeDecodeError:
        findings.append(error("E04", f"{file}: not UTF-8 text; save it as CSV in UTF-8"))
        return None
    except OSError as failure:
        findings.append(
            error("E04", f"{file}: cannot be read: {failure.strerror}; mend or remove it")
        )
        return None
    before, nul, _ = text.partition("\0")
    if nul:  # No path can have one; UTF-16 without a mark has many.
        line = before.count("\n") + 1
        findings.append(
            error("E04", f"{file} line {line}: a NUL character; save it as CSV in UTF-8")
        )
        return None
    return text


def _rows(text: str, file: Path, findings: list[Finding]) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, with the number of the line on which each begins."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for row in reader:
            if row:
                yield begin, row
            begin = reader.line_num + 1
    except csv.Error as failure:
        findings.append(
            error("E04", f"{file} line {begin}: {failure}; check the quotes of this line")
        )


def _wrong(row: list[str], columns: int) -> str | None:
    """What is wrong with a row, apart from where its path leads."""
    if len(row) != columns:
        fix = "; put a text with commas into double quotes" if len(row) > columns else ""
        return f"{len(row)} columns, the header has {columns}{fix}"
    path, label, split = row[0], row[1], row[2].strip()
    if not path.strip():
        return "the path is empty"
    if not label.strip():
        return "the label is empty"
    if split not in ("train", "test"):
        fix = "; put novel classes into novel/<class>/" if split.lower() == "novel" else ""
        return f"split {quoted([split])} is not train or test{fix}"
    return None


def _separator(header: list[str]) -> str:
    """What to do with a header whose columns something else than a comma separates."""
    for mark, name in ((";", "semicolons"), ("\t", "TABs")):
        if len(header) == 1 and mark in header[0]:
            return f"; separate columns by commas, not {name}"
    return ""


def _has_drive(path: str) -> bool:
    return bool(PureWindowsPath(path).drive)
