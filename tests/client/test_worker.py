"""Real processes, real sockets, real kills; the node is a small fake, so no torch is loaded."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blend_core import __version__
from blend_core.errors import ConfigError, RunError, SiteError
from blend_core.messages import Reply, Request
from client import link, worker
from client.channel import connect, private_folder, read_key
from client.process import Process
from client.site import Site
from client.worker import RECORD, Record

ROOT = Path(__file__).parents[2]
FEDERATION = "fed-1"
FAKE_NODE = """
import os, signal, sys, time
from pathlib import Path
from blend_core.errors import SiteError
from blend_core.messages import Reply

class Node:
    def __init__(self, site, federation):
        print("node built", flush=True)
        self.site = site

    def handle(self, request):
        order = request.experiment
        if order.get("once") and not Path(order["once"]).exists():
            Path(order["once"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if order.get("die"):
            os._exit(1)
        if order.get("crash"):
            raise ValueError("two\\nlines")
        if order.get("block"):
            Path(order["block"]).touch()
            while True:
                time.sleep(0.01)
        facts = {
            "pid": os.getpid(),
            "folder": os.getcwd(),
            "flower": [name for name in os.environ if name.startswith("FLWR_")],
            "path": sys.path,
        }
        doubled = {name: 2 * value for name, value in request.shared.items()}
        return Reply(request.kind, request.round, self.site.name, "v", 5, facts, shared=doubled)

class Broken:
    def __init__(self, site, federation):
        raise ValueError("cannot\\nbe built")

class NoImages:
    def __init__(self, site, federation):
        raise SiteError("no images here")
"""


@dataclass
class Home:
    """A site, and how to ask its worker."""

    site: Site
    timeout: float = 20.0

    @property
    def folder(self) -> Path:
        return self.site.folder(FEDERATION)

    def ask(self, node: str = "fake_node:Node", **order: Any) -> Reply:
        request = Request("train", FEDERATION, 7, order)
        return link.ask(self.site, FEDERATION, request, self.timeout, node)

    def pid(self) -> int:
        reply = self.ask()
        assert reply.error is None
        return reply.statistics["pid"]

    def record(self) -> Record:
        record = Record.read(self.folder)
        assert record is not None
        return record


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    (tmp_path / "fake_node.py").write_text(FAKE_NODE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    home = Home(Site("a", tmp_path / "state", worker_idle=60.0, verbose_errors=True))
    yield home
    record = Record.read(home.folder)
    if record is not None and record.process.alive():
        link._end(record)
    # Of workers that were killed and not replaced.
    shutil.rmtree(private_folder(str(home.folder)))


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 15
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def start_worker(home: Home, parent: int, before: str = "pass") -> subprocess.Popen[str]:
    """Start a worker without a ClientApp; `before` may change its constants."""
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-c",
                f"import sys, client.worker as w; {before}; sys.exit(w.main())",
            ),
            *("--site", json.dumps(home.site.to_json()), "--federation", FEDERATION),
            *("--parent-pid", str(parent), "--node", "fake_node:Node"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (home.folder / RECORD).exists() or process.poll() is not None)
    return process


def exchange(home: Home, **order: Any) -> Reply:
    record = home.record()
    return link._exchange(record, Request("join", FEDERATION, 0, order), time.monotonic() + 15)


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_worker_answers_many_messages_and_loads_once(home: Home) -> None:
    shared = {"b": np.ones((2, 3), np.float32), "a": np.arange(4, dtype=np.float32)}
    replies = [
        link.ask(
            home.site, FEDERATION, Request("train", FEDERATION, n, {}, shared=shared), 20.0,
            "fake_node:Node",
        )
        for n in (1, 2, 3)
    ]  # fmt: skip
    assert len({reply.statistics["pid"] for reply in replies}) == 1
    assert [reply.round for reply in replies] == [1, 2, 3]
    np.testing.assert_array_equal(replies[0].shared["b"], 2 * shared["b"])
    np.testing.assert_array_equal(replies[2].shared["a"], [0, 2, 4, 6])
    log = (home.folder / "worker.log").read_text()
    assert log.count("node built") == 1
    facts = replies[0].statistics
    assert facts["pid"] == home.record().process.pid != os.getpid()


def test_a_worker_inherits_neither_folder_nor_path_nor_flowers_variables(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    (bundle / "client").mkdir(parents=True)
    (bundle / "client" / "__init__.py").write_text("raise RuntimeError('the bundle')")
    monkeypatch.chdir(bundle)
    monkeypatch.syspath_prepend(str(bundle))
    monkeypatch.setenv("FLWR_TOKEN", "secret")
    facts = home.ask().statistics
    assert facts["folder"] == str(home.folder)
    assert facts["flower"] == []
    assert str(bundle) not in facts["path"]
    assert "" not in facts["path"]


def test_a_worker_killed_between_messages_is_replaced(home: Home) -> None:
    first = home.pid()
    os.kill(first, signal.SIGKILL)
    assert home.pid() != first


def test_a_worker_killed_in_a_request_is_replaced_and_the_request_answered(
    home: Home, tmp_path: Path
) -> None:
    first = home.pid()
    reply = home.ask(once=str(tmp_path / "killed"))
    assert reply.error is None
    assert reply.statistics["pid"] != first
    assert (tmp_path / "killed").exists()


def test_a_worker_that_always_dies_is_not_replaced_for_ever(home: Home) -> None:
    with pytest.raises(SiteError, match=r"^its worker ended 3 times.*worker\.log"):
        home.ask(die=True)
    assert (home.folder / "worker.log").read_text().count("node built") == 3


def test_no_answer_in_time_is_reported_and_frees_the_site(home: Home, tmp_path: Path) -> None:
    first = home.pid()
    home.timeout = 1.0
    with pytest.raises(RunError, match=r"^no answer within 1 s"):
        home.ask(block=str(tmp_path / "blocked"))
    home.timeout = 20.0
    assert home.pid() != first


def test_an_unexpected_crash_is_a_reply_of_one_line_and_the_worker_goes_on(home: Home) -> None:
    first = home.pid()
    reply = home.ask(crash=True)
    assert (reply.error, reply.exit_code, reply.client) == ("ValueError: two lines", 1, "a")
    assert (reply.kind, reply.round, reply.version) == ("train", 7, __version__)
    assert "Traceback" in (home.folder / "worker.log").read_text()
    assert home.pid() == first


@pytest.mark.parametrize(
    ("node", "error", "code"),
    [
        ("fake_node:Broken", "ValueError: cannot be built", 1),
        ("fake_node:NoImages", "no images here", 3),
        ("no_such_module:Node", "ModuleNotFoundError: No module named 'no_such_module'", 1),
    ],
)
def test_a_node_that_cannot_be_built_is_a_reply(
    node: str, error: str, code: int, home: Home
) -> None:
    for _ in range(2):
        reply = home.ask(node)
        assert (reply.error, reply.exit_code) == (error, code)
    assert home.record().process.alive()


def test_a_worker_that_dies_at_its_start_is_reported_with_the_end_of_its_log(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(SiteError, match=r"^its worker ended at its start.*shorter one.*log"):
        home.ask()


def test_a_worker_ends_when_it_has_been_idle(home: Home) -> None:
    home.site = replace(home.site, worker_idle=0.2)
    process = start_worker(home, os.getpid())
    assert process.wait(15) == 0
    assert not (home.folder / RECORD).exists()
    home.timeout = 20.0
    home.site = replace(home.site, worker_idle=60.0)
    assert home.pid() != process.pid


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_ends_with_its_parent(
    busy: bool, home: Home, parent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process = start_worker(home, parent.pid)
    sockets = private_folder(str(home.folder))
    assert {f.name for f in sockets.iterdir()} == {"socket", "key"}
    if busy:
        block = str(tmp_path / "blocked")
        threading.Thread(target=lambda: _ignore(lambda: exchange(home, block=block))).start()
        wait_for((tmp_path / "blocked").exists)
    parent.kill()
    assert process.wait(15) == 0
    assert not sockets.exists()
    assert not (home.folder / RECORD).exists()


def _ignore(work: Callable[[], Any]) -> None:
    with suppress(ConnectionError):
        work()


def test_a_worker_ends_on_sigterm_and_cleans_up(home: Home) -> None:
    process = start_worker(home, os.getpid())
    sockets = private_folder(str(home.folder))
    process.terminate()
    assert process.wait(15) == 0
    assert not sockets.exists()
    assert not (home.folder / RECORD).exists()


def test_a_client_with_a_wrong_key_does_not_disturb_the_others(home: Home) -> None:
    first = home.pid()
    path = Path(home.record().socket)
    with pytest.raises(ConnectionError):
        connect(path, bytes(32), 5.0)
    assert home.pid() == first


def test_clients_that_hang_before_or_after_the_handshake_do_not_block_a_worker(home: Home) -> None:
    assert worker.HANDSHAKE + worker.RECEIVE <= 10
    process = start_worker(home, os.getpid(), "w.HANDSHAKE = w.RECEIVE = 0.2")
    path = Path(home.record().socket)
    key = read_key(path.with_name("key"))
    with socket.socket(socket.AF_UNIX) as silent, connect(path, key, 5.0):
        silent.connect(str(path))
        assert exchange(home).statistics["pid"] == process.pid
    process.terminate()
    process.wait(15)


def test_a_socket_folder_that_others_can_open_is_refused(home: Home) -> None:
    sockets = private_folder(str(home.folder))
    sockets.chmod(0o755)
    try:
        with pytest.raises(SiteError, match=sockets.name):
            home.ask()
    finally:
        sockets.rmdir()


ASK = """
import sys
from pathlib import Path
from blend_core.messages import Request
from client.link import ask
from client.site import Site
request = Request("train", "fed-1", 1, {})
site = Site("a", Path(sys.argv[1]), worker_idle=60.0)
print(ask(site, "fed-1", request, 30.0, "fake_node:Node").statistics["pid"])
"""


def test_two_starters_at_once_end_up_with_one_worker(home: Home) -> None:
    command = [sys.executable, "-c", ASK, str(home.site.state_dir)]
    askers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    pids = {asker.communicate(timeout=30)[0] for asker in askers}
    assert len(pids) == 1
    assert pids != {b""}
    assert (home.folder / "worker.log").read_text().count("node built") == 1


def test_a_second_live_worker_on_the_same_folder_is_refused(home: Home) -> None:
    first = home.pid()
    record = (home.folder / RECORD).read_text()
    (home.folder / RECORD).unlink()  # so that nobody finds the first one
    try:
        with pytest.raises(SiteError, match=f"is used by process {first}"):
            home.ask()
    finally:
        (home.folder / RECORD).write_text(record)
    assert home.pid() == first


def change_record(home: Home, **changes: Any) -> None:
    data = json.loads((home.folder / RECORD).read_text())
    (home.folder / RECORD).write_text(json.dumps({**data, **changes}))


def test_a_worker_of_another_version_is_replaced(home: Home) -> None:
    first = home.pid()
    change_record(home, version="0.0.1")
    assert home.pid() != first
    assert home.record().version == __version__


def test_an_installation_of_another_version_is_an_error_and_no_loop(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "__version__", "9.9.9")
    with pytest.raises(ConfigError, match=rf"9\.9\.9.*{__version__}"):
        home.ask()


def test_a_changed_node_config_replaces_the_worker(home: Home) -> None:
    first = home.pid()
    home.site = replace(home.site, worker_idle=61.0)
    assert home.pid() != first


def test_two_supernodes_cannot_be_the_same_site(
    home: Home, parent: subprocess.Popen[bytes]
) -> None:
    first = home.pid()
    own = home.record().parent
    other = Process.of(parent.pid)
    change_record(home, parent=vars(other))
    with pytest.raises(
        SiteError, match=f"process {first} of another SuperNode .process {other.pid}"
    ):
        home.ask()
    parent.kill()
    parent.wait()
    assert not other.alive()
    assert own.alive()
    assert home.pid() != first  # the other SuperNode has ended, so its worker is replaced


def test_a_damaged_record_of_a_dead_worker_is_replaced(home: Home) -> None:
    first = home.pid()
    link._end(home.record())
    for text in ("", "{", "[]", '{"process": 3}'):
        (home.folder / RECORD).write_text(text)
        assert Record.read(home.folder) is None
    assert home.pid() != first


def test_a_process_is_not_confused_with_a_later_one_of_the_same_number(
    parent: subprocess.Popen[bytes],
) -> None:
    process = Process.of(parent.pid)
    assert process.alive()
    assert not replace(process, start=process.start + "0").alive()
    parent.kill()
    # Not waited for, it stays as a zombie.
    wait_for(lambda: not process.alive())


def test_a_worker_belongs_to_the_supernode_above_and_ends_with_it(
    home: Home, tmp_path: Path
) -> None:
    """Flower's process tree: flower-supernode > flower-superexec > flwr-clientapp."""
    (tmp_path / "flower-superexec").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', '''{ASK}''', sys.argv[1]])"
    )
    (tmp_path / "flower-supernode").write_text(
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, {str(tmp_path / 'flower-superexec')!r}, sys.argv[1]])\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, str(tmp_path / "flower-supernode"), str(home.site.state_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supernode:
        assert supernode.stdout is not None
        pid = int(supernode.stdout.readline())
        record = home.record()
        assert record.process.pid == pid
        assert record.parent == Process.of(supernode.pid)
        assert record.process.alive()
        supernode.kill()
    wait_for(lambda: not record.process.alive())


def test_the_link_is_light_enough_for_every_message() -> None:
    code = "import sys, client.link; print({'torch', 'flwr', 'open_clip'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
