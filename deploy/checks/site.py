"""A site's state folder, and keys and certificates."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blend_core.state import Generations, StateError
from deploy.checks import SITE, Check, Settings, begins, failure, ok
from deploy.checks.keys import keys
from deploy.checks.machine import existing


def site(settings: Settings) -> Iterator[Check]:
    """What is asked for of state folder, keys and certificates."""
    if settings.state_dir is not None:
        advice = "is it on a network drive that hangs? choose a local folder"
        yield begins("state folder", "looking", advice, SITE)
        yield from state_folder(Path(settings.state_dir).expanduser().absolute())
    yield from keys(settings)


def state_folder(folder: Path) -> Iterator[Check]:
    """Whether it can be written, nobody uses it, and the newest state in it is intact."""
    name = "state folder"
    try:
        there = existing(folder)
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        what = f"{folder}: cannot be written: {error.strerror}"
        yield failure(name, what, "fix its permissions or make room, or name another folder", SITE)
        return
    used = [
        f"{lock.parent} (process {owner})" for lock in _locks(folder) if (owner := _owner(lock))
    ]
    if used:
        advice = (
            "a second SuperNode would be refused; end the first, or choose another folder (if this "
            "is the site that runs, all is well)"
        )
        yield failure(name, f"in use: {', '.join(used)}", advice, SITE)
        return
    clients = sorted({file.parent for file in folder.glob("*/*/round-*.safetensors")})
    for client in clients:
        try:
            Generations(client).newest_before(sys.maxsize)
        except StateError as error:
            yield failure(name, str(error), "or start again with another state folder", SITE)
            return
    new = "" if there == folder else " will be created"
    kept = f", newest state of {len(clients)} intact" if clients else ""
    yield ok(name, f"{folder}{new}, can be written{kept}")


def _locks(folder: Path) -> list[Path]:
    """Lock files of the workers of this site: one per federation and client."""
    return sorted([*folder.glob("lock"), *folder.glob("*/*/lock")])


def _owner(lock: Path) -> str:
    """Who holds a lock; "" if nobody does.

    Shared and given back at once: a worker that starts at this moment tries for a while.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
    except OSError:
        return ""
    finally:
        os.close(descriptor)
