"""The names that compete at a site, and the label of each of its classes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blend_core.data.findings import Finding, error, has_errors, raise_first
from blend_core.data.listing import SiteImage, classes_of, is_inside
from blend_core.data.vocabulary import (
    CLASSES,
    check_names,
    likely_line,
    quoted,
    read_classes_file,
)
from blend_core.errors import ConfigError, SiteError
from blend_core.names import reading

__all__ = ["LabelSpace", "label_space_of"]


@dataclass(frozen=True)
class LabelSpace:
    """The names that compete at a site.

    Attributes:
        names: by label.
        labels: label of every local class (its folder, or its text in the manifest), and of those
            that only `classes.txt` lists.
    """

    names: tuple[str, ...]
    labels: Mapping[str, int]


def label_space_of(
    data_dir: Path,
    images: Sequence[SiteImage],
    kind: str,
    federation_classes: Sequence[str],
    findings: list[Finding],
) -> LabelSpace:
    """Decide which names compete (PROTOCOL 7.1).

    With "node" they are those of `classes.txt` in its order or, without that file, the local
    classes; with "federation" they are `federation_classes`, to which local classes are matched
    as the model reads them.

    Args:
        data_dir: the site's folder.
        images: of train and test; their classes are the local ones.
        kind: "node" or "federation".
        federation_classes: the federation's class names; only used with "federation".
        findings: receives E05, E07, E09, E10 and E12, and E04 of `classes.txt`.

    Raises:
        ConfigError: an unknown kind, or `federation_classes` read the same.
    """
    if kind not in ("node", "federation"):
        raise ConfigError(f"label-space = {kind!r}: must be node or federation")
    local = classes_of(images)
    check_names(local, str(data_dir), findings)
    texts = _texts(data_dir, local, kind, findings)
    if kind == "federation":
        space = _federation(data_dir, texts, federation_classes, findings)
    else:
        space = LabelSpace(
            tuple(texts.values()), {name: number for number, name in enumerate(texts)}
        )
    if local and len(space.names) < 2 and not has_errors(findings):
        findings.append(
            error(
                "E07",
                f"{data_dir}: only one class ({quoted(space.names)}), so there is nothing to "
                "learn; list further names in classes.txt or set label-space to "
                f"federation{_likely_level(images)}",
            )
        )
    return space


def _likely_level(images: Sequence[SiteImage]) -> str:
    """Whether the folders below the only class look like the classes."""
    below = set()
    for image in images:
        folders = image.path.split("/")[1:-1]
        if folders[:1] != [image.class_name] or len(folders) < 2:
            return ""  # An image directly in the class, or one that a manifest lists.
        below.add(folders[1])
    if len(below) < 2:
        return ""
    return f"; if {quoted(sorted(below))} are the classes, move them one folder up"


def _texts(
    data_dir: Path, local: Sequence[str], kind: str, findings: list[Finding]
) -> dict[str, str]:
    """What the prompts call every class; in "node" also those that are only in `classes.txt`."""
    listed = data_dir / CLASSES
    if not os.path.lexists(listed) or not is_inside(listed, os.path.realpath(data_dir), findings):
        return {name: name for name in local}
    before = len(findings)
    texts = read_classes_file(listed, findings)
    missing = [name for name in local if name not in texts]
    if kind == "node" and missing and len(findings) == before:
        strangers = [line for line in texts if line not in local]
        text = (
            f"{listed}: no line for the class {quoted(missing)}; add it, or remove the file to "
            f"use the classes' own names{likely_line(missing[0], strangers)}"
        )
        findings.append(error("E04", text))
    if kind == "federation":
        return {name: texts.get(name, name) for name in local}
    return texts


def _federation(
    data_dir: Path,
    texts: Mapping[str, str],
    federation_classes: Sequence[str],
    findings: list[Finding],
) -> LabelSpace:
    wrong: list[Finding] = []
    check_names(federation_classes, "data.classes", wrong)
    try:
        raise_first(wrong)
    except SiteError as failure:  # The operator's list, not the site's.
        raise ConfigError(str(failure)) from None
    numbers = {reading(name): number for number, name in enumerate(federation_classes)}
    labels = {n: numbers[reading(text)] for n, text in texts.items() if reading(text) in numbers}
    unknown = [name for name in texts if name not in labels]
    if unknown:
        class_word, verb = ("class", "is") if len(unknown) == 1 else ("classes", "are")
        findings.append(
            error(
                "E10",
                f"{data_dir}: {class_word} {quoted(unknown)} {verb} not in the federation's class "
                f"list ({len(numbers)} classes); rename or ask the operator",
            )
        )
    return LabelSpace(tuple(federation_classes), labels)
