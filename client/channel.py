"""A local socket between the short-lived ClientApp and the worker of the same site.

The socket lies in a folder that only this user can open, and both ends prove that they know a
key from a file beside it. What crosses it is data only: a JSON header and float32 values, never
pickled objects. Every wait ends at a deadline with `TimeoutError`; everything else that goes
wrong with the peer is a `ConnectionError`.

Bytes on the wire: the worker sends `GREETING` and 32 random bytes; the client answers with 32
random bytes and HMAC-SHA256(key, "client" + both); the worker with HMAC-SHA256(key, "worker" +
both). Then frames: length (8 bytes, little-endian) and payload. A message's payload is the
length of its header (8 bytes), the header in UTF-8 padded with spaces to a multiple of 4 bytes,
and the float32 values, little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from blend_core.errors import SiteError
from blend_core.messages import FloatArray
from blend_core.state import write_bytes_atomic

GREETING = b"blend-worker-1\n"
KEY_BYTES = 32
MAX_FRAME = 2**31
# sun_path of Linux is 108 bytes with its final zero; that of macOS 104.
MAX_SOCKET_PATH = 103


class Channel:
    """One authenticated connection; use it in a `with`. Timeouts are seconds for the whole call."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def send(self, header: str, vector: FloatArray, timeout: float) -> None:
        """Send a message. Raises `TimeoutError`, `ConnectionError`, `ValueError` (too large)."""
        text = header.encode()
        text += b" " * (-len(text) % 4)
        values = np.ascontiguousarray(vector, dtype="<f4").reshape(-1)
        length = 8 + len(text) + values.nbytes
        if length > MAX_FRAME:
            raise ValueError(f"a message of {length} bytes exceeds {MAX_FRAME}")
        deadline = time.monotonic() + timeout
        start = length.to_bytes(8, "little") + len(text).to_bytes(8, "little") + text
        _send(self._socket, memoryview(start), deadline)
        _send(self._socket, values.view(np.uint8).data, deadline)

    def receive(self, timeout: float) -> tuple[str, FloatArray]:
        """Return (header, flat float32 vector). Raises `TimeoutError`, `ConnectionError`."""
        deadline = time.monotonic() + timeout
        length = int.from_bytes(_receive(self._socket, 8, deadline), "little")
        if not 8 <= length <= MAX_FRAME:
            raise ConnectionError(f"the peer announced a frame of {length} bytes")
        payload = _receive(self._socket, length, deadline)
        end = 8 + int.from_bytes(payload[:8], "little")
        if end > length or (length - end) % 4 or end % 4:
            raise ConnectionError("the peer sent a frame of another layout")
        try:
            header = payload[8:end].decode().rstrip(" ")
        except UnicodeDecodeError as error:
            raise ConnectionError("the peer sent a header that is not text") from error
        return header, np.frombuffer(payload, dtype="<f4", offset=end).astype("f4", copy=False)


def connect(path: Path, key: bytes, timeout: float) -> Channel:
    """Connect to a worker and let both ends prove the key.

    Raises:
        ConnectionError: nobody listens there, or the worker has another key.
        TimeoutError: the worker does not answer in time (it may be busy).
    """
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left(deadline))
        connection.connect(os.fspath(path))
        greeting = _receive(connection, len(GREETING) + KEY_BYTES, deadline)
        if not greeting.startswith(GREETING):
            raise ConnectionError("another kind of server listens there")
        nonces = bytes(greeting[len(GREETING) :]) + secrets.token_bytes(KEY_BYTES)
        _send(connection, nonces[KEY_BYTES:] + _proof(key, b"client", nonces), deadline)
        proof = _receive(connection, KEY_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(key, b"worker", nonces)):
            raise ConnectionError("the worker has another key")
    except (TimeoutError, ConnectionError):
        connection.close()
        raise
    except OSError as error:  # no such file, queue full, ...
        connection.close()
        raise ConnectionError(f"{path}: cannot connect: {error.strerror}") from error
    return Channel(connection)


def listen(path: Path) -> socket.socket:
    """Listen on a socket file that only this user can use; one left by a dead owner is replaced.

    Raises:
        SiteError: the path is too long for a socket, or cannot be used.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise SiteError(f"{path}: longer than {MAX_SOCKET_PATH} bytes; set TMPDIR to a shorter one")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        listener.bind(os.fspath(path))
        # The folder's mode keeps others out until this is done.
        path.chmod(0o600)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise SiteError(f"{path}: cannot listen there: {error.strerror}") from error
    return listener


def accept(listener: socket.socket, key: bytes, wait: float, handshake: float) -> Channel:
    """Wait for a client and let both ends prove the key.

    Args:
        listener: from `listen`.
        key: the worker's key, 32 bytes.
        wait: seconds to wait for somebody to connect.
        handshake: seconds that the client has to prove the key.

    Raises:
        TimeoutError: nobody came, or the client did not prove the key in time.
        ConnectionError: the client went away or has another key.
    """
    listener.settimeout(wait)
    connection, _ = listener.accept()
    deadline = time.monotonic() + handshake
    try:
        nonce = secrets.token_bytes(KEY_BYTES)
        _send(connection, GREETING + nonce, deadline)
        answer = bytes(_receive(connection, 2 * KEY_BYTES, deadline))
        nonces = nonce + answer[:KEY_BYTES]
        if not hmac.compare_digest(answer[KEY_BYTES:], _proof(key, b"client", nonces)):
            raise ConnectionError("a client with another key was refused")
        _send(connection, _proof(key, b"worker", nonces), deadline)
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


def private_folder(label: str) -> Path:
    """A short folder for sockets that only this user can open; the same for the same label.

    Raises:
        SiteError: a folder of that name exists that another user owns or others can open.
    """
    # Short because a socket's path is; so not in the state folder, whose path may be long.
    digest = hashlib.sha256(label.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"blend-{os.getuid()}-{digest}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise SiteError(f"{folder}: cannot be created: {error.strerror}") from error
    # In a folder for everybody, somebody else may have been there first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SiteError(f"{folder}: is not a folder of this user; remove it, or set TMPDIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SiteError(f"{folder}: others can open it; remove it, or set its mode to 700")
    return folder


def create_key(path: Path) -> bytes:
    """Write a new random key that only this user can read. Raises `StateError`."""
    key = secrets.token_bytes(KEY_BYTES)
    write_bytes_atomic(path, key, mode=0o600)
    return key


def read_key(path: Path) -> bytes:
    """Read a worker's key. Raises `ConnectionError`: the worker that wrote it is gone."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConnectionError(f"{path}: cannot be read: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise ConnectionError(f"{path}: holds {len(key)} bytes instead of {KEY_BYTES}")
    return key


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    # The role keeps a peer from answering a challenge with the other side's own answer.
    return hmac.digest(key, role + nonces, "sha256")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the peer did not answer in time")
    return left


def _send(connection: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    rest = memoryview(data)
    while rest:
        connection.settimeout(_left(deadline))
        rest = rest[connection.send(rest) :]


def _receive(connection: socket.socket, length: int, deadline: float) -> bytearray:
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        connection.settimeout(_left(deadline))
        count = connection.recv_into(rest)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        rest = rest[count:]
    return data
