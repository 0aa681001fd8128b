"""A site's own record of what left it: one line in `ledger.jsonl` per reply of its node,
before it leaves. What answers where the node could not be asked carries nothing but an error line.

A line means that a reply left, or was about to when the site was killed. A round that is done again
gives a second line; its hash must be the first one's. Names of tensors are written out in full in
every line: they are what an auditor looks for, and a few kB beside an upload of MB.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from blend_core.errors import SiteError, one_line
from blend_core.messages import Kind, Reply, Request, header_of, tensor_bytes
from blend_core.schema import Section
from blend_core.state import make_folder, tensors_sha256, write_bytes_atomic

LEDGER = "ledger.jsonl"
# In front of the first digits of a line's own SHA-256, by which a damaged line is told.
_CHECK = ',"check":"'
_CHECK_DIGITS = 16


class Entry(Section):
    """One reply.

    Attributes:
        time: when it was about to leave, UTC, ISO 8601 with milliseconds.
        federation, client, kind, round: whose reply, and to what.
        method: name of the method that the server asked for.
        experiment: SHA-256 of the experiment as the server sent it, 64 hexadecimal digits.
        train_images: number of training images that the reply tells.
        tensors: names of the tensors in it, sorted.
        tensor_bytes: bytes that these take.
        sha256: of the tensors, `blend_core.state.tensors_sha256`.
        header_bytes: bytes of everything else that is in the reply.
        statistics: keys of its statistics, with dots between levels, sorted.
        error: the error that it tells; None if it tells none.
    """

    time: str
    federation: str
    client: str
    kind: Kind
    round: int
    method: str
    experiment: str
    train_images: int
    tensors: tuple[str, ...]
    tensor_bytes: int
    sha256: str
    header_bytes: int
    statistics: tuple[str, ...]
    error: str | None


class Ledger:
    """The ledger of one site in one federation; one process at a time writes it.

    Args:
        folder: of the site's private state of the federation; created when needed.
        federation: its name.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self.path = folder / LEDGER
        self.federation = federation

    def append(self, request: Request, reply: Reply) -> None:
        """Write down, durably, what a reply holds.

        Raises:
            SiteError: it cannot be written; then the reply must not leave.
        """
        entry = _entry(self.federation, request, reply)
        body = entry.model_dump_json()
        line = f'{body[:-1]}{_CHECK}{_check(body)}"}}\n'.encode()
        make_folder(self.path.parent)
        try:
            if not self.path.exists():
                write_bytes_atomic(self.path, b"", mode=0o600)  # Its name is durable, too.
            _append(self.path, line)
        except OSError as error:
            raise SiteError(
                f"{self.path}: cannot be written: {error.strerror}; nothing leaves the site "
                "unrecorded: make room or fix the permissions"
            ) from error


def read_ledger(path: Path) -> tuple[list[Entry], list[str]]:
    """The entries of a ledger, and what is wrong with it: lines that were left out, or none.

    A site that was killed may leave half a line.

    Raises:
        SiteError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SiteError(f"{path}: cannot be read: {error.strerror}") from None
    entries, problems = [], []
    for number, line in enumerate(lines, 1):
        body, _, check = line.decode(errors="replace").rpartition(_CHECK)
        try:
            if check != f'{_check(f"{body}}}")}"}}':
                raise ValueError
            entries.append(Entry.model_validate_json(f"{body}}}"))
        except (ValueError, ValidationError):
            problems.append(f"{path}: line {number} is cut short or damaged, and left out")
    if not lines:  # A full disk leaves such a file.
        problems.append(f"{path}: is empty")
    return entries, problems


def disagreements(entries: Iterable[Entry]) -> list[str]:
    """Rounds that were answered more than once, with different tensors; one line for each."""
    answers: dict[tuple[str, str, Kind, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.error is None:
            answers[entry.federation, entry.client, entry.kind, entry.round].append(entry)
    lines = []
    for (federation, client, kind, round), found in answers.items():
        different = len({entry.sha256 for entry in found})
        if different == 1:
            continue
        changed = len({entry.experiment for entry in found}) > 1
        why = "between them the server changed" if changed else "the server had not changed"
        lines.append(
            f"{federation}, {client}: {kind} of round {round} was answered {len(found)} times "
            f"with {different} different contents; {why} the experiment"
        )
    return lines


def _entry(federation: str, request: Request, reply: Reply) -> Entry:
    asked = json.dumps(request.experiment, sort_keys=True)
    method = request.experiment.get("method")
    name = method.get("name") if isinstance(method, dict) else None
    return Entry(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        federation=federation,
        client=reply.client,
        kind=reply.kind,
        round=reply.round,
        method=one_line(str(name), 80),
        experiment=hashlib.sha256(asked.encode()).hexdigest(),
        train_images=reply.train_images,
        tensors=tuple(sorted(reply.tensors)),
        tensor_bytes=tensor_bytes(reply.tensors),
        sha256=tensors_sha256(reply.tensors),
        header_bytes=len(header_of(reply).encode()),
        statistics=tuple(sorted(_keys(reply.statistics))),
        error=reply.error,
    )


def _keys(values: Mapping[str, Any]) -> Iterable[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in _keys(value))
        else:
            yield key


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:_CHECK_DIGITS]


def _append(path: Path, line: bytes) -> None:
    """Add a line and make it durable; afterwards all of it is there, or nothing was added."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        # After half a line of a process that was killed, this one must begin on its own.
        whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        rest = memoryview(line if whole else b"\n" + line)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
