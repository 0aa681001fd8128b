"""The Flower ClientApp: a thin door. Takes a message in, hands it to the node, takes one out.

Nothing heavy is imported here: in a deployment Flower starts one process per message, and the
site's worker keeps model and images in memory. In simulation the Ray actor is the worker.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from blend_core.errors import BlendError
from blend_core.messages import Reply, Request, failure
from client.site import Site

if TYPE_CHECKING:
    from client.node import Node

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def handle(message: Message, context: Context) -> Message:
    """Answer one message of the server, whatever it asks."""
    header = str(message.content["message"]["header"])
    arrays = message.content.get("arrays")
    vector = arrays["shared"].numpy() if arrays else np.zeros(0, dtype=np.float32)
    request = Request.unpack(header, vector)
    header, vector = answer(request, context).pack()
    content = RecordDict({"message": ConfigRecord({"header": header})})
    if vector.size:
        content["arrays"] = ArrayRecord({"shared": Array(vector)})
    return Message(content, reply_to=message)


def answer(request: Request, context: Context) -> Reply:
    """Let the worker answer for a named site, this process for a simulated client."""
    name = str(context.node_config.get("client-name", f"node {context.node_id}"))
    try:
        if "client-name" in context.node_config:
            from client.link import ask

            site = Site.from_node_config(context.node_config)
            timeout = float(request.experiment["server"]["round_timeout"])
            return ask(site, request.federation, request, timeout)
        out = Path(str(context.run_config.get("out") or Path.cwd() / "runs" / request.federation))
        site = _simulated_site(request, context, out)
        return _node(json.dumps(site.to_json()), request.federation).handle(request)
    except BlendError as error:
        return failure(request.kind, request.round, name, error)


def _simulated_site(request: Request, context: Context, out: Path) -> Site:
    """A simulated client is known by its place in the list of client names."""
    from blend_core.config import parse_experiment
    from blend_core.data import client_names

    partition = int(context.node_config["partition-id"])
    names = client_names(parse_experiment(request.experiment)) or []
    return Site(
        name=names[partition], state_dir=out / "state" / names[partition], partition=partition
    )


@cache
def _node(site: str, federation: str) -> Node:
    """One node per simulated client and actor, with its images in memory."""
    from client.node import Node

    return Node(Site.from_json(json.loads(site)), federation)
