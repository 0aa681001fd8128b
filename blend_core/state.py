"""Durable files: atomic, checksummed, by generation.

Whatever a crash, a full disk or a bad sector does, a file of ours is afterwards either the old
one, the new one, or recognised as damaged and named. Nothing is replaced by something else in
silence. Imports no torch: the server and the thin parts of a site use this module, too.

A tensor file is one ordinary safetensors file (any safetensors reader opens it) with three
metadata entries: `format` ("1"), `header` (the caller's JSON object) and `sha256`. The checksum
is the SHA-256 of the whole file with its own 64 digits replaced by zeros, so a single flipped
bit anywhere, be it in a tensor, a name or the padding, is noticed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from blend_core.errors import SiteError

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Header = dict[str, Any]

FORMAT = "1"
# Generations that a folder keeps, unless it is told another number.
KEPT = 3
_NO_DIGEST = "0" * 64
# Between two looks at a lock that somebody else has.
_LOOK_SECONDS = 0.02
_ROUND_FILE = re.compile(r"round-(\d{6,})\.safetensors")


class StateError(SiteError):
    """A file or folder of state is unusable; the text names it and what is wrong.

    `round` is that of a damaged generation, None if the error is not about one; `intact` is the
    newest intact generation before it, None if there is none.
    """

    def __init__(self, message: str, round: int | None = None, intact: int | None = None) -> None:
        super().__init__(message)
        self.round = round
        self.intact = intact


def tensors_sha256(tensors: Mapping[str, Array]) -> str:
    """SHA-256 (64 hexadecimal digits) of named tensors, whatever their order or memory layout.

    Hashed, for every name in sorted order: the name in UTF-8, the dtype name such as "float32",
    the number of dimensions, each dimension, and the values, little-endian in C order. Text and
    values are preceded by their length in bytes; lengths, counts and dimensions are unsigned
    64-bit little-endian, so no two different mappings feed the same bytes. No tensors: the
    SHA-256 of nothing, e3b0c442...
    """
    digest = hashlib.sha256()

    def feed(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    for name in sorted(tensors):
        value = _little_endian(tensors[name])
        feed(name.encode())
        feed(value.dtype.name.encode())
        for number in (value.ndim, *value.shape):
            digest.update(number.to_bytes(8, "little"))
        feed(value.tobytes())
    return digest.hexdigest()


def write_bytes_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file durably: afterwards it holds either all of `data` or what it held before.

    Args:
        path: the file; its folder must exist.
        data: the new content.
        mode: permissions of a new file before the umask, e.g. 0o600 for a key.

    Raises:
        StateError: disk full, no permission, ...; the old file is untouched.
    """
    # The same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written: {error.strerror}; "
            "make room or fix the permissions, then start again"
        ) from error


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a file durably by JSON text (sorted keys, two spaces, strict: no NaN).

    Raises:
        StateError: as `write_bytes_atomic`.
        TypeError, ValueError: `value` is not JSON data, or holds NaN or infinity.
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes_atomic(path, (text + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Array], header: Header) -> None:
    """Write tensors and a JSON object as one checksummed safetensors file, durably.

    The same content gives the same bytes. `header` must be strict JSON data (no NaN). Only the
    user may read the file: it may be a site's private model.

    Raises:
        StateError: as `write_bytes_atomic`; the old file is untouched.
    """
    write_bytes_atomic(path, _encode(tensors, header), mode=0o600)


def read_tensors(path: Path) -> tuple[Tensors, Header]:
    """Read a file of `write_tensors` and check every bit of it.

    Returns:
        The tensors by name (writable, own memory) and the header.

    Raises:
        StateError: the file is missing, empty, truncated, damaged, or not one of ours.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _decode(data)
    except _DamagedError as error:
        raise StateError(f"{path}: {error}") from None


def make_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power cut.

    Raises:
        StateError: it cannot be created, or something that is not a folder is in the way.
    """
    try:
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for created in missing:
            _sync_folder(created.parent)
    except OSError as error:
        raise StateError(f"{folder}: cannot be created: {error.strerror}") from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Own a folder (created if missing) for the time of a `with`; `folder/lock` names the owner.

    The kernel drops the lock when the owner ends, however it ends, so there are no stale locks.

    Raises:
        StateError: another process owns the folder (its number is named).
    """
    make_folder(folder)
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StateError(f"{folder / 'lock'}: cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "(starting)"
            raise StateError(
                f"{folder} is used by process {owner}; only one at a time can: "
                "end that one, or choose another folder"
            ) from None
        except OSError as error:
            raise StateError(f"{folder}: cannot be locked: {error.strerror}") from error
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:
            raise StateError(f"{folder}: cannot be written: {error.strerror}") from error
        yield
    finally:
        # The file stays: removing it would let a third process lock a new file of that name
        # while a second one waits for the old.
        os.close(descriptor)


@contextmanager
def lock_file(path: Path, deadline: float, busy: str) -> Iterator[None]:
    """Own a file (created if missing) for the time of a `with`; wait until nobody else does.

    Args:
        path: the file; its folder must exist.
        deadline: of the wait, in seconds of the monotonic clock.
        busy: what to say when it is over.

    Raises:
        SiteError: another process has it all the time.
        StateError: the file cannot be opened or locked.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StateError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SiteError(busy) from None
                time.sleep(_LOOK_SECONDS)
            except OSError as error:
                raise StateError(f"{path}: cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


class Generations:
    """One tensor file per round, `round-000007.safetensors`, in a folder with one owner.

    When a round is saved again, the generations after it belong to a future that the federation
    has abandoned. Before the new file is written they are renamed to
    `abandoned-000008.safetensors`, so nothing here finds them again, in whatever rounds the
    client takes part from then on, and a person still can.
    """

    def __init__(self, folder: Path, keep: int = KEPT) -> None:
        """Args: folder (created on the first save); keep: generations to keep, at least 1."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.folder = folder
        self.keep = keep

    def path(self, round: int) -> Path:
        """The file of one round."""
        return self.folder / f"round-{round:06d}.safetensors"

    def rounds(self) -> list[int]:
        """The rounds that have a file, damaged or not, in rising order."""
        names = (f.name for f in self.folder.glob("round-*.safetensors"))
        return sorted(int(m.group(1)) for m in map(_ROUND_FILE.fullmatch, names) if m)

    def save(self, round: int, tensors: Mapping[str, Array], header: Header) -> None:
        """Make a round's generation durable, then remove all but the `keep` newest.

        `header` gets the entry "round". Raises `StateError`; older generations are untouched.
        """
        make_folder(self.folder)
        for temporary in self.folder.glob(".round-*.tmp"):  # of a writer that was killed
            _remove(temporary)
        try:
            for later in [r for r in self.rounds() if r > round]:
                os.replace(self.path(later), self.folder / f"abandoned-{later:06d}.safetensors")
        except OSError as error:
            raise StateError(f"{self.folder}: cannot be written: {error.strerror}") from error
        write_tensors(self.path(round), tensors, {**header, "round": round})
        for old in self.rounds()[: -self.keep]:
            _remove(self.path(old))
        for abandoned in sorted(self.folder.glob("abandoned-*.safetensors"))[: -self.keep]:
            _remove(abandoned)

    def load(self, round: int) -> tuple[Tensors, Header]:
        """Read and check one generation. Raises `StateError`."""
        tensors, header = read_tensors(self.path(round))
        if header.get("round") != round:
            raise StateError(f"{self.path(round)}: holds round {header.get('round')} by its header")
        return tensors, header

    def newest_before(self, round: int) -> tuple[int, Tensors, Header] | None:
        """The newest generation of a round smaller than `round`; None if there is none.

        Raises:
            StateError: the newest file is damaged. The text names it and the newest intact
                generation before it (also in `intact`); using that one is the caller's choice.
        """
        earlier = [r for r in self.rounds() if r < round]
        if not earlier:
            return None
        try:
            return (earlier[-1], *self.load(earlier[-1]))
        except StateError as error:
            intact = next((r for r in reversed(earlier[:-1]) if self._is_intact(r)), None)
            rest = (
                "no intact generation is left before it"
                if intact is None
                else f"round {intact} before it is intact; restore this file from a backup"
            )
            raise StateError(f"{error}; {rest}", earlier[-1], intact) from None

    def _is_intact(self, round: int) -> bool:
        try:
            self.load(round)
        except StateError:
            return False
        return True


class _DamagedError(Exception):
    """What is wrong with the bytes of a tensor file."""


def _encode(tensors: Mapping[str, Array], header: Header) -> bytes:
    # Not np.ascontiguousarray, which makes a vector of a scalar.
    data: bytes = save_safetensors(
        {n: _little_endian(tensors[n]).copy("C") for n in sorted(tensors)}
    )
    size = int.from_bytes(data[:8], "little")
    layout = json.loads(data[8 : 8 + size]) if tensors else {}
    # Written here and not by the library, which puts metadata in a random order.
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, allow_nan=False)
    metadata = {"format": FORMAT, "header": text, "sha256": _NO_DIGEST}
    head = json.dumps(
        {"__metadata__": metadata, **layout}, separators=(",", ":"), ensure_ascii=False
    ).encode()
    head += b" " * (-len(head) % 8)  # the format wants the tensors aligned
    blank = len(head).to_bytes(8, "little") + head + data[8 + size :]
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(_digest_entry(_NO_DIGEST), _digest_entry(digest), 1)


def _digest_entry(digest: str) -> bytes:
    # Unambiguous: inside the header's text and in tensor names every quote has a backslash.
    return f'"sha256":"{digest}"'.encode()


def _decode(data: bytes) -> tuple[Tensors, Header]:
    if not data:
        raise _DamagedError("is empty")
    size = int.from_bytes(data[:8], "little")
    if data[8:9] not in (b"{", b""):
        raise _DamagedError("is not a tensor file of this product, or its beginning is damaged")
    if len(data) < 8 + size:
        raise _DamagedError(f"is truncated or damaged: it ends after {len(data)} bytes")
    try:
        layout = json.loads(data[8 : 8 + size])
        metadata = layout.pop("__metadata__", {})
        ends = [entry["data_offsets"][1] for entry in layout.values()]
        length = 8 + size + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise _DamagedError("is damaged: its layout cannot be read") from None
    if len(data) != length:
        kind = "is truncated" if len(data) < length else "is damaged"
        raise _DamagedError(f"{kind}: {len(data)} bytes instead of {length}")
    digest = metadata.get("sha256")
    if not isinstance(digest, str) or metadata.get("format") != FORMAT:
        raise _DamagedError(f"is not a tensor file of this product in format {FORMAT}, or damaged")
    blank = data.replace(_digest_entry(digest), _digest_entry(_NO_DIGEST), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise _DamagedError("is damaged: its checksum differs from its content")
    try:
        tensors = load_safetensors(data)
        header = json.loads(metadata["header"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise _DamagedError(f"cannot be read although its checksum is right: {error}") from None
    # Copies, because arrays over the bytes of the file may be read-only.
    return {name: np.array(tensors[name]) for name in sorted(tensors)}, header


def _little_endian(value: Array) -> Array:
    return np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file that is no longer needed; failing to is no reason to fail a round."""
    with suppress(OSError):
        path.unlink()
