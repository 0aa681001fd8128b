"""The Flower ClientApp: a thin door. Takes a message in, hands it to the node, takes one out.

Nothing heavy is imported here: in a deployment Flower starts one process per message, and the
site's worker keeps model and images in memory. In simulation the Ray actor is the worker.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from blend_core import __version__
from blend_core.errors import BlendError, ConfigError, RunError, described, one_line
from blend_core.messages import Kind, Reply, Request, failure
from client.site import Site, local_site

if TYPE_CHECKING:
    from client.node import Node

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def handle(message: Message, context: Context) -> Message:
    """Answer one message of the server, whatever it asks."""
    header, vector = answer(message, context).pack()
    content = RecordDict({"message": ConfigRecord({"header": header})})
    if vector.size:
        content["arrays"] = ArrayRecord({"shared": Array(vector)})
    return Message(content, reply_to=message)


def answer(message: Message, context: Context) -> Reply:
    """Let the worker answer for a site, this process for a simulated client."""
    kind: Kind = "join"
    number, site = 0, None
    try:
        if not _in_simulation():
            site = Site.from_node_config(context.node_config)
        header = str(message.content["message"]["header"])
        arrays = message.content.get("arrays")
        vector = arrays["shared"].numpy() if arrays else np.zeros(0, dtype=np.float32)
        request = Request.unpack(header, vector)
        kind, number = request.kind, request.round
        if request.version != __version__:
            theirs = one_line(request.version, 40)
            raise ConfigError(
                f"this site runs version {__version__}, the server {theirs}; "
                "install the same one at both"
            )
        if site is not None:
            from client.link import ask

            wait = "formation_timeout" if kind == "join" else "round_timeout"
            timeout = float(request.experiment["server"][wait])
            return ask(site, request.federation, request, timeout)
        site = _simulated_site(request, context)
        return _node(json.dumps(site.to_json()), request.federation).handle(request)
    except Exception as error:
        # Flower would send the error's text to the server; what may go there, the site decides.
        name = f"node {context.node_id}" if site is None else site.name
        line = f"blend: {name}, round {number}: {described(error)}"
        print(line, file=sys.stderr, flush=True)
        known = isinstance(error, BlendError)
        told = site.for_outside(error) if site else error if known else RunError("it failed")
        return failure(kind, number, name, told)


def _in_simulation() -> bool:
    """Whether this process is an actor of Flower's simulation, which loads Ray before us."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _simulated_site(request: Request, context: Context) -> Site:
    """A simulated client is known by its place in the list of client names."""
    from blend_core.config import parse_experiment
    from blend_core.data import client_names

    experiment = parse_experiment(request.experiment)
    names = client_names(experiment)
    index = int(context.node_config["partition-id"])
    if names is None or index >= len(names):
        raise ConfigError(
            f"node {index} of the simulation has no client: clients = {experiment.clients}; give "
            "as many nodes as clients, and data.root for folders"
        )
    out = str(context.run_config.get("out") or Path("runs") / request.federation)
    return local_site(experiment, names[index], index, Path(out))


@cache
def _node(site: str, federation: str) -> Node:
    """One node per simulated client and actor, with its images in memory."""
    from client.node import Node

    return Node(Site.from_json(json.loads(site)), federation)
