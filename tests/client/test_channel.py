import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blend_core.errors import SiteError
from client import channel
from client.channel import Channel, accept, connect, create_key, listen, private_folder, read_key

KEY = bytes(range(32))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bt-") as name:  # short, as socket paths must be
        yield Path(name)


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    with listen(folder / "socket") as listening:
        yield listening


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread; its result or error is put into the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def pair(listener: socket.socket) -> tuple[Channel, Channel]:
    path = Path(listener.getsockname())
    thread, results = beside(lambda: connect(path, KEY, 5.0))
    server = accept(listener, KEY, 5.0, 5.0)
    thread.join(5)
    return server, results[0]


def test_messages_of_any_size_arrive_unchanged(listener: socket.socket) -> None:
    server, client = pair(listener)
    big = np.arange(3_000_000, dtype=np.float32)  # far more than a socket buffers
    with server, client:
        for header, vector in [("{}", big[:0]), ("ü" * 5, big[:1]), ("a", big)]:
            thread, _ = beside(lambda h=header, v=vector: client.send(h, v, 10.0))
            got_header, got = server.receive(10.0)
            thread.join(5)
            assert got_header == header
            np.testing.assert_array_equal(got, vector)
            assert got.dtype == np.float32


def test_a_peer_that_ends_in_mid_frame_is_a_connection_error() -> None:
    left, right = socket.socketpair()
    with Channel(left) as end:
        right.sendall((100).to_bytes(8, "little") + b"half")
        right.close()
        with pytest.raises(ConnectionError, match="closed"):
            end.receive(5.0)


@pytest.mark.parametrize(
    "data",
    [
        (2**40).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"abcd",
        (12).to_bytes(8, "little") + (900).to_bytes(8, "little") + b"abcd",
        (12).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"abcd",
        (12).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
    ],
)
def test_a_frame_that_is_too_large_or_malformed_is_refused(data: bytes) -> None:
    left, right = socket.socketpair()
    with Channel(left) as end, right:
        right.sendall(data)
        with pytest.raises(ConnectionError):
            end.receive(5.0)


def test_a_message_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_FRAME", 100)
    left, right = socket.socketpair()
    with Channel(left) as end, right, pytest.raises(ValueError, match="exceeds 100"):
        end.send("{}", np.zeros(100, np.float32), 5.0)


def test_nothing_waits_longer_than_its_deadline(listener: socket.socket) -> None:
    left, right = socket.socketpair()
    with Channel(left) as end, right:
        with pytest.raises(TimeoutError):
            end.receive(0.05)
        right.sendall(b"\x64")  # a peer that drips does not prolong it
        with pytest.raises(TimeoutError):
            end.receive(0.05)
        with pytest.raises(TimeoutError):  # nobody reads
            end.send("", np.zeros(3_000_000, np.float32), 0.05)
    with pytest.raises(TimeoutError):
        accept(listener, KEY, 0.05, 5.0)
    with pytest.raises(TimeoutError):  # listens, but never answers
        connect(Path(listener.getsockname()), KEY, 0.05)


def test_a_client_that_hangs_before_it_proves_the_key_is_dropped(listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(listener.getsockname())
        with pytest.raises(TimeoutError):
            accept(listener, KEY, 5.0, 0.05)
        silent.settimeout(5.0)
        while silent.recv(1000):
            pass  # the greeting, then the end


def test_a_client_with_another_key_is_refused(listener: socket.socket) -> None:
    thread, results = beside(lambda: connect(Path(listener.getsockname()), bytes(32), 5.0))
    with pytest.raises(ConnectionError, match="another key"):
        accept(listener, KEY, 5.0, 5.0)
    thread.join(5)
    assert isinstance(results[0], ConnectionError)


def test_a_client_notices_a_worker_with_another_key(listener: socket.socket) -> None:
    def impostor() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(channel.GREETING + bytes(32))
            connection.recv(1000)
            connection.sendall(bytes(32))

    beside(impostor)
    with pytest.raises(ConnectionError, match="another key"):
        connect(Path(listener.getsockname()), KEY, 5.0)


def test_nobody_listening_is_a_connection_error(folder: Path) -> None:
    with pytest.raises(ConnectionError):
        connect(folder / "none", KEY, 1.0)
    listen(folder / "dead").close()
    with pytest.raises(ConnectionError):
        connect(folder / "dead", KEY, 1.0)
    with listen(folder / "dead"):  # what a dead owner left is replaced
        assert stat.S_IMODE((folder / "dead").stat().st_mode) == 0o600


def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="TMPDIR"):
        listen(tmp_path / ("x" * 104))


def test_keys_are_random_and_private(folder: Path) -> None:
    keys = {create_key(folder / "key"), create_key(folder / "key")}
    assert len(keys) == 2
    assert read_key(folder / "key") in keys
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    (folder / "key").write_bytes(b"short")
    with pytest.raises(ConnectionError, match="5 bytes"):
        read_key(folder / "key")
    with pytest.raises(ConnectionError):
        read_key(folder / "none")


@pytest.fixture
def sockets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_socket_folder_is_private_and_stable(sockets: Path) -> None:
    made = private_folder("/state/fed/a")
    assert made == private_folder("/state/fed/a") != private_folder("/state/fed/b")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert made.parent == sockets
    assert len(made.name) < 40


def test_a_socket_folder_that_others_can_open_is_refused(sockets: Path) -> None:
    made = private_folder("x")
    for mode in (0o750, 0o705, 0o777):
        made.chmod(mode)
        with pytest.raises(SiteError, match=made.name):
            private_folder("x")


def test_a_socket_folder_of_somebody_else_is_refused(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = private_folder("x")
    owner = os.getuid()
    made.rename(made.with_name(made.name.replace(f"-{owner}-", f"-{owner + 1}-")))
    monkeypatch.setattr(channel.os, "getuid", lambda: owner + 1)
    with pytest.raises(SiteError, match="not a folder of this user"):
        private_folder("x")


def test_a_link_in_place_of_the_socket_folder_is_refused(sockets: Path) -> None:
    made = private_folder("x")
    made.rename(sockets / "elsewhere")
    made.symlink_to(sockets / "elsewhere")
    with pytest.raises(SiteError, match="not a folder of this user"):
        private_folder("x")
