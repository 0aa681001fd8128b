"""Class names of a site: where they are written, and when two of them are the same to CLIP."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable
from pathlib import Path

from blend_core.data.findings import Finding, error
from blend_core.names import composed, reading

__all__ = ["CLASSES", "check_names", "likely_line", "quoted", "read_classes_file", "read_regular"]

CLASSES = "classes.txt"
# Characters of a name that a message shows.
_SHOWN = 80


def quoted(names: Iterable[str], limit: int = 5) -> str:
    """The first few names for a message of one line, whatever characters they hold."""
    listed = list(names)
    cut = (name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..." for name in listed[:limit])
    text = ", ".join(json.dumps(name, ensure_ascii=False) for name in cut)
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"


def check_names(
    names: Iterable[str], where: str, findings: list[Finding], taken: Iterable[str] = ()
) -> None:
    """Find empty names (E12) and those that read the same to the model as another one (E09).

    Args:
        names: class names.
        where: the file or folder they come from, for the message.
        findings: receives the errors.
        taken: names that `names` must differ from as well; they are not checked again.
    """
    seen = {reading(name): name for name in taken}
    for name in names:
        key = reading(name)
        if not key:
            findings.append(
                error("E12", f"{where}: class name {quoted([name])} is empty; rename it")
            )
        elif not _is_text(name):
            shown = name.encode(errors="backslashreplace").decode()
            findings.append(error("E12", f'{where}: class name "{shown}" is not UTF-8; rename it'))
        elif key in seen:
            findings.append(
                error(
                    "E09",
                    f"{where}: classes {quoted([seen[key]])} and {quoted([name])} read the same to "
                    "the model; merge or rename them",
                )
            )
        else:
            seen[key] = name


def _is_text(name: str) -> bool:
    """Whether it can be encoded: file systems allow names that are no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_regular(path: Path) -> str:
    """UTF-8 text of a file, with or without a byte order mark.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read. A pipe would keep us waiting for ever.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "no regular file")
    return path.read_bytes().decode("utf-8-sig")


def read_classes_file(path: Path, findings: list[Finding]) -> dict[str, str]:
    """Read `classes.txt`: one class a line, `folder` or `folder<TAB>prompt text`.

    Blank lines and lines that start with `#` are skipped; blanks around either part do not count.
    The file is UTF-8 with or without a byte order mark.

    Args:
        path: an existing file.
        findings: receives errors: an empty name (E12), a folder that occurs twice or two names
            that read the same (E09), a file that cannot be read (E04).

    Returns:
        Class name (the prompt text, else the folder) by folder, both composed, in file order.
    """
    try:
        text = read_regular(path)
    except UnicodeDecodeError:
        findings.append(error("E04", f"{path}: not UTF-8 text; save it as UTF-8"))
        return {}
    except OSError as failure:
        text = f"{path}: cannot be read: {failure.strerror}; mend or remove it"
        findings.append(error("E04", text))
        return {}
    names: dict[str, str] = {}
    # Not splitlines(), which would cut a line at characters that a class name may contain.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        folder, *texts = (composed(part.strip()) for part in line.split("\t", maxsplit=1))
        name = texts[0] if texts else folder
        where = f"{path} line {number}"
        if not folder or not name:
            findings.append(
                error("E12", f"{where}: expected folder<TAB>prompt text, one of them is empty")
            )
        elif folder in names:
            findings.append(
                error("E09", f"{where}: {quoted([folder])} occurs twice; remove one line")
            )
        else:
            names[folder] = name
    check_names(names.values(), str(path), findings)
    return names


def likely_line(folder: str, listed: Iterable[str]) -> str:
    """What may be wrong with the line of `classes.txt` that was meant for a folder.

    Args:
        folder: a class without a line.
        listed: the folders of the lines that are of no class, as they were read.

    Returns:
        A hint that begins with "; ", or nothing.
    """
    for line in listed:
        if re.split(r"[;,]", line)[0].strip() == folder or line.startswith(f"{folder} "):
            return f"; put one TAB between folder and words, not as in {quoted([line])}"
        if re.split(r"[/\\]", line)[-1] == folder:
            return f"; write the folder's own name, not {quoted([line])}"
    return ""
