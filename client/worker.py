"""The long-lived process of one site and one federation, behind the short-lived ClientApps.

Flower starts a fresh process for every message; loading CLIP, the images and CUDA there would
cost more than the training. So the ClientApp hands its request to this process (see
`client.link`), which imports `client.node` once and answers requests one at a time. It ends
with the SuperNode, after `worker_idle` seconds without a message, or on SIGTERM; since every
file that matters is written atomically, it may be killed at any moment.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from blend_core import __version__
from blend_core.errors import BlendError
from blend_core.messages import FloatArray, Kind, Reply, Request, failure
from blend_core.state import StateError, lock_folder, write_json_atomic
from client.channel import accept, create_key, listen, private_folder
from client.process import Process
from client.site import Site

logger = logging.getLogger("blend.worker")

DEFAULT_NODE = "client.node:Node"
RECORD = "worker.json"
# Seconds. The first two bound how long a client that hangs can keep the others waiting.
HANDSHAKE = 3.0
RECEIVE = 5.0
SEND = 10.0
WATCH = 0.5
LOCK_PATIENCE = 1.0


class Handler(Protocol):
    """What a node looks like from here."""

    def handle(self, request: Request) -> Reply: ...


@dataclass(frozen=True)
class Record:
    """How a ClientApp finds the worker: `worker.json` in the site's folder of a federation."""

    process: Process
    parent: Process
    version: str
    socket: str
    site: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record in a folder; None if there is none or it cannot be read."""
        try:
            data = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            process, parent = Process(**data.pop("process")), Process(**data.pop("parent"))
            return cls(process=process, parent=parent, **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # If a worker lives all the same, the folder's lock keeps a second one out.
            return None


class Worker:
    """Serves one site's requests of one federation; the caller holds the folder's lock.

    Args:
        site, federation: whose requests these are.
        parent: the SuperNode with which the worker ends.
        node: "module:attribute" of what is called with (site, federation) and has `handle`.
    """

    def __init__(self, site: Site, federation: str, parent: Process, node: str) -> None:
        self.site = site
        self.federation = federation
        self.parent = parent
        self.node = node
        self._loaded: Handler | None = None

    def run(self) -> None:
        """Serve until idle for too long or ended by SIGTERM. Raises `SiteError` at the start."""
        folder = self.site.folder(self.federation)
        sockets = private_folder(str(folder))
        path, key_path = sockets / "socket", sockets / "key"
        try:
            key = create_key(key_path)
            with listen(path) as listener:
                record = Record(
                    Process.of(os.getpid()),
                    self.parent,
                    __version__,
                    str(path),
                    self.site.to_json(),
                )
                write_json_atomic(folder / RECORD, asdict(record))
                self._load_early()
                self._serve(listener, key)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # The record first: who still finds it must find somebody listening.
            for file in (folder / RECORD, path, key_path):
                with suppress(OSError):
                    file.unlink()
            with suppress(OSError):
                sockets.rmdir()

    def _serve(self, listener: socket.socket, key: bytes) -> None:
        last_message = time.monotonic()
        while True:
            left = last_message + self.site.worker_idle - time.monotonic()
            if left <= 0:
                logger.info("no message for %g s: ending", self.site.worker_idle)
                return
            try:
                with accept(listener, key, left, HANDSHAKE) as channel:
                    reply = self._answer(*channel.receive(RECEIVE))
                    last_message = time.monotonic()
                    channel.send(*reply, SEND)
            except (TimeoutError, ConnectionError) as error:
                # Also when nobody came until the idle time was over.
                logger.info("no exchange with a client: %s", error)

    def _answer(self, header: str, vector: FloatArray) -> tuple[str, FloatArray]:
        """Answer packed with packed; whatever goes wrong comes back in one line."""
        kind: Kind = "join"
        number = 0
        try:
            request = Request.unpack(header, vector)
            kind, number = request.kind, request.round
            return self._handler().handle(request).pack()
        except Exception as error:
            logger.exception("%s of round %d failed", kind, number)
            return failure(kind, number, self.site.name, self.site.for_outside(error)).pack()

    def _load_early(self) -> None:
        """Load while the first client still packs its request."""
        try:
            self._handler()
        except Exception:
            # Tried again for every request, whose reply then says why.
            logger.exception("the node cannot be loaded")

    def _handler(self) -> Handler:
        if self._loaded is None:
            # Late and by name, so that a broken installation is a reply and not a dead worker.
            module, _, attribute = self.node.partition(":")
            node = getattr(importlib.import_module(module), attribute)
            self._loaded = cast(Handler, node(self.site, self.federation))
        return self._loaded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; returns its exit code (0 ended as it should, 3 the state is unusable)."""
    parser = argparse.ArgumentParser("client.worker", description=__doc__)
    parser.add_argument("--site", required=True, help="the site as JSON")
    parser.add_argument("--federation", required=True, help="name of the federation")
    parser.add_argument("--parent-pid", type=int, required=True, help="the SuperNode")
    parser.add_argument("--parent-start", default="", help="when it started; unset: as it is now")
    parser.add_argument("--node", default=DEFAULT_NODE, help="module:attribute of the node")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _end)
    parent = Process.of(options.parent_pid)
    if options.parent_start:
        parent = Process(options.parent_pid, options.parent_start)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    try:
        site = Site.from_json(json.loads(options.site))
        logger.info("worker of %s, version %s", Path(__file__).parent, __version__)
        with _own(site.folder(options.federation)):
            Worker(site, options.federation, parent, options.node).run()
    except BlendError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _end(signal_number: int, frame: object) -> None:
    raise SystemExit(0)  # not an Exception, so no handler of requests catches it


def _watch(parent: Process) -> None:
    """End this process when its parent has ended, also in the middle of a request."""
    while parent.alive():
        time.sleep(WATCH)
    # More than once, because an exit raised inside a destructor is lost.
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(WATCH)
    os._exit(1)


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Lock the folder; a predecessor that was killed may take a moment to let go of it."""
    deadline = time.monotonic() + LOCK_PATIENCE
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_folder(folder))
                break
            except StateError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield


if __name__ == "__main__":
    sys.exit(main())
