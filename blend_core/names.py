"""Names: of clients and federations, which become folders, and of classes, which are read."""

from __future__ import annotations

import re
import unicodedata

from blend_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_name(key: str, name: str | None) -> str:
    """Return a name that is safe as the name of a folder. Raises `ConfigError` naming `key`."""
    if name is None:
        raise ConfigError(f"{key}: missing; give one, or partition-id to derive it from")
    if not is_plain_name(name):
        raise ConfigError(
            f"{key} = {name!r}: must be 1 to 64 letters, digits, dots, hyphens or underscores "
            "and begin with a letter or digit"
        )
    return name


def is_plain_name(name: str) -> bool:
    """Whether a name is safe as the name of a folder: letters, digits and ._- of 1 to 64."""
    return bool(_NAME.fullmatch(name))


def client_name(partition: int, partitions: int | None = None) -> str:
    """The name of the client that holds a partition: client-00, or client-000 of 1000.

    Two digits, more when the last of `partitions` needs them, so names sort by number.
    """
    width = max(2, len(str((partitions or 1) - 1)))
    return f"client-{partition:0{width}d}"


def composed(name: str) -> str:
    """The name in Unicode's composed form (NFC): file systems differ in how they spell accents."""
    return unicodedata.normalize("NFC", name)


def reading(name: str) -> str:
    """What a reader sees of a name in a prompt.

    `_` is a space; case, outer blanks and invisible characters do not count.
    """
    seen = "".join(c for c in composed(name) if unicodedata.category(c) != "Cf")
    return composed(" ".join(seen.replace("_", " ").split()).casefold())
