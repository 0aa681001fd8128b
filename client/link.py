"""From a short-lived ClientApp process to the site's worker, starting one if none is alive.

Runs in Flower's process for every message, so it imports neither torch nor Flower.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from blend_core import __version__
from blend_core.errors import ConfigError, RunError, SiteError
from blend_core.messages import Reply, Request
from blend_core.state import lock_file, make_folder
from client.channel import connect, read_key
from client.process import PROC, Process, process_status
from client.site import Site
from client.worker import DEFAULT_NODE, Record

LOG = "worker.log"
MAX_LOG = 10_000_000
REPLACEMENTS = 2
# Seconds.
START = 60.0
GRACE = 5.0
POLL = 0.02

# Kept so that a worker that ends while this process lives is reaped and its end seen.
_started: list[subprocess.Popen[bytes]] = []


def ask(
    site: Site, federation: str, request: Request, timeout: float, node: str = DEFAULT_NODE
) -> Reply:
    """Let the site's worker answer a request.

    A worker that dies meanwhile is replaced, twice at most, and the request is sent again: the
    round is simply done again, with the same result. A worker that does not answer in time is
    ended, so that it does not keep the next request waiting.

    Args:
        site, federation: whose worker; they decide the folder of the private state.
        request: what to ask.
        timeout: seconds for everything, starting the worker included.
        node: what answers in the worker, "module:attribute".

    Returns:
        The reply, which may carry an error of the site.

    Raises:
        RunError: no reply in time, from a worker that was there.
        SiteError: the state folder is unusable or used by another SuperNode's worker, or the
            worker cannot be started or died again and again.
        ConfigError: the worker's installation has another version than this process.
    """
    deadline = time.monotonic() + timeout
    problem = ""
    for _ in range(1 + REPLACEMENTS):
        try:
            record = _find_or_start(site, federation, deadline, node)
        except ConnectionError as error:
            problem = str(error)
            continue
        except OSError as error:
            raise SiteError(f"no worker can be started: {error}") from error
        try:
            return _exchange(record, request, deadline)
        except TimeoutError:
            _end(record)
            raise RunError(f"no answer within {timeout:g} s; its worker was ended") from None
        except ConnectionError as error:
            problem = str(error)
            _end(record)
    log = site.folder(federation) / LOG
    raise SiteError(
        f"its worker ended {1 + REPLACEMENTS} times before it answered ({problem}); "
        f"it may have run out of memory, see {log}"
    )


def supernode() -> Process:
    """The SuperNode above this process, with which a worker ends.

    Flower runs flower-supernode > flower-superexec > flwr-clientapp: the nearest ancestor whose
    command is flower-supernode. Without one (superexec started by hand, tests) the topmost
    ancestor that is not init; without /proc the direct parent.
    """
    pid = top = os.getppid()
    while pid > 0:
        with suppress(OSError):
            words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            if any(os.path.basename(word) == b"flower-supernode" for word in words):
                return Process.of(pid)
        if pid > 1:
            top = pid
        found = process_status(pid)
        pid = found.parent if found else 0
    return Process.of(top)


def _exchange(record: Record, request: Request, deadline: float) -> Reply:
    path = Path(record.socket)
    with connect(path, read_key(path.with_name("key")), _left(deadline)) as channel:
        channel.send(*request.pack(), _left(deadline))
        return Reply.unpack(*channel.receive(_left(deadline)))


def _find_or_start(site: Site, federation: str, deadline: float, node: str) -> Record:
    folder = site.folder(federation)
    make_folder(folder)
    busy = f"{folder}: another process has been starting a worker for too long"
    with lock_file(folder / "starting", deadline, busy):
        parent = supernode()
        record = Record.read(folder)
        if record is not None and record.process.alive():
            if record.parent != parent and record.parent.alive():
                raise SiteError(
                    f"{folder} is used by process {record.process.pid} of another SuperNode "
                    f"(process {record.parent.pid}): give this one another client-name or state-dir"
                )
            expected = (parent, __version__, site.to_json())
            if (record.parent, record.version, record.site) == expected:
                return record
            _end(record)  # of an earlier SuperNode, package version or node config
        record = _start(site, federation, folder, parent, deadline, node)
        if record.version != __version__:
            _end(record)
            raise ConfigError(
                f"the app is of version {__version__}, the package installed "
                f"at the site of version {record.version}; install the same version"
            )
        return record


def _start(
    site: Site, federation: str, folder: Path, parent: Process, deadline: float, node: str
) -> Record:
    """Start a worker and wait until it listens (it loads CLIP only after that)."""
    log = folder / LOG
    command = [
        *(sys.executable, "-P", "-m", "client.worker"),
        *("--site", json.dumps(site.to_json()), "--federation", federation),
        *("--parent-pid", str(parent.pid), "--parent-start", parent.start, "--node", node),
    ]
    # Flower puts its copy of the app first on the sys.path of this process only; the worker must
    # import the installed package, which has the weights and outlives the copy. So nothing of
    # sys.path is handed on, -P and the folder's own state as current folder keep stray packages
    # out, and Flower's variables (addresses, tokens) stay here: a worker never talks to it.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
    mode = "wb" if log.exists() and log.stat().st_size > MAX_LOG else "ab"
    with log.open(mode) as output:
        begin = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            # Its own session, so that neither a Ctrl-C nor the end of this process reaches it.
            start_new_session=True,
            close_fds=True,
        )
    _started[:] = [p for p in _started if p.poll() is None] + [process]
    deadline = min(deadline, time.monotonic() + START)
    while True:
        record = Record.read(folder)
        if record is not None and record.process.alive():
            return record
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            process.kill()
            if code is not None and code < 0:
                raise ConnectionError(f"killed by signal {-code} at its start")
            what = "was not ready in time" if code is None else f"ended at its start (code {code})"
            raise SiteError(f"its worker {what}: {_last_lines(log, begin)}; see {log}")
        time.sleep(POLL)


def _last_lines(log: Path, begin: int, count: int = 3) -> str:
    """The end of a log from byte `begin` on, in one line."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-count:]) or "nothing logged"


def _end(record: Record) -> None:
    """End a worker: ask, and after `GRACE` seconds make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        if record.process.alive():
            with suppress(ProcessLookupError):
                os.kill(record.process.pid, number)
        while record.process.alive() and time.monotonic() < deadline:
            time.sleep(POLL)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    return left
