"""Engine `loop`: all clients one after the other in this process, without Flower.

The reference that the other engines must equal bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from blend_core.config import Experiment
from blend_core.data import client_names
from blend_core.errors import ConfigError
from blend_core.messages import Reply, Request
from client.node import Node
from client.site import local_site
from server.strategy import Coordinator


class LoopTransport:
    """Hands requests to nodes in this process.

    Args:
        nodes: client -> what answers for it.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        """Let every node join, one after the other, until the deadline."""
        for _, reply in self.ask(dict.fromkeys(self.nodes, request), timeout):
            yield reply

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Answer the requests in the order of names; the deadline is checked between clients."""
        deadline = time.monotonic() + timeout
        for client, request in sorted(requests.items()):
            if time.monotonic() >= deadline:
                return
            yield client, self.nodes[client].handle(request)


def run_loop(
    experiment: Experiment,
    out: Path,
    federation: str,
    started: float | None = None,
    resume: bool = False,
) -> None:
    """Run the experiment in this process; results are written to `out`.

    Args:
        experiment: the resolved experiment.
        out: the run's folder.
        federation: unique id of this run's federation, of a resumed one that of its checkpoint.
        started: unix time at which the user started the run, seconds; unset: now.
        resume: go on after the newest checkpoint in `out`.

    Raises:
        BlendError: the run failed; the journal in `out` says the same.
    """
    names = client_names(experiment)
    if names is None:
        raise ConfigError("data.kind = 'folders' needs data.root in the loop engine")
    sites = [local_site(experiment, name, index, out) for index, name in enumerate(names)]
    transport = LoopTransport({site.name: Node(site, federation) for site in sites})
    Coordinator(experiment, transport, out, federation, "loop", started, resume=resume).run()
