"""Class names of a site: where they are written, and when two of them are the same to CLIP."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from blend_core.errors import SiteError

__all__ = ["check_names", "composed", "quoted", "read_classes_file", "reading"]


def composed(name: str) -> str:
    """The name in Unicode's composed form (NFC): file systems differ in how they spell accents."""
    return unicodedata.normalize("NFC", name)


def reading(name: str) -> str:
    """What a prompt makes of a name: `_` is a space, and case and outer blanks do not count."""
    return " ".join(composed(name).replace("_", " ").split()).casefold()


def quoted(names: Iterable[str], limit: int = 5) -> str:
    """The first few names for a message of one line, whatever characters they hold."""
    listed = list(names)
    text = ", ".join(json.dumps(name, ensure_ascii=False) for name in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse a list of class names in which one is empty or two read the same to the model.

    Args:
        names: class names.
        where: the file or folder they come from, for the message.

    Raises:
        SiteError: E12 or E09.
    """
    seen: dict[str, str] = {}
    for name in names:
        key = reading(name)
        if not key:
            raise SiteError(f"E12 {where}: class name {quoted([name])} is empty; rename it")
        if key in seen:
            raise SiteError(
                f"E09 {where}: classes {quoted([seen[key]])} and {quoted([name])} read the same to "
                "the model; merge or rename them"
            )
        seen[key] = name


def read_classes_file(path: Path) -> dict[str, str]:
    """Read `classes.txt`: one class a line, `folder` or `folder<TAB>prompt text`.

    Blank lines and lines that start with `#` are skipped; blanks around either part do not count.

    Args:
        path: an existing file, UTF-8 with or without a byte order mark.

    Returns:
        Class name (the prompt text, else the folder) by folder, both composed, in file order.

    Raises:
        SiteError: the file cannot be read, a name is empty (E12), a folder occurs twice or two
            names read the same (E09).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SiteError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise SiteError(f"{path}: cannot be read: {error.strerror}") from None
    names: dict[str, str] = {}
    # Not splitlines(), which would cut a line at characters that a class name may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        folder, *texts = (composed(part.strip()) for part in line.split("\t", maxsplit=1))
        name = texts[0] if texts else folder
        where = f"{path} line {number}"
        if not folder or not name:
            raise SiteError(f"E12 {where}: expected folder<TAB>prompt text, one of them is empty")
        if folder in names:
            raise SiteError(f"E09 {where}: {quoted([folder])} occurs twice; remove one line")
        names[folder] = name
    check_names(names.values(), str(path))
    return names
