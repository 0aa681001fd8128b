"""Clients behind Flower's grid: by name, one message per client and call, with deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from blend_core.errors import RunError
from blend_core.messages import MessageError, Reply, Request, failure

logger = logging.getLogger("blend.server")

POLL_SECONDS = 0.1
MESSAGE_TYPES = {"join": "query", "train": "train", "evaluate": "evaluate"}


class FlowerTransport:
    """Reaches clients by name over Flower's messages.

    Flower's node ids change when a SuperNode restarts; names do not. Every node that appears is
    asked to join, and the node that answered with a name is where that name's requests go.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.nodes: dict[str, int] = {}
        self._asked: set[int] = set()
        self._joining: dict[str, int] = {}
        self._join_request: Request | None = None

    def join(self, request: Request, wanted: int, timeout: float) -> Iterator[Reply]:
        """Ask every node that appears to join; yield one reply per new client name."""
        self._join_request = request
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            yield from self._joined(deadline)
            if len(self.nodes) >= wanted:
                return
            time.sleep(POLL_SECONDS)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send the requests and yield (client asked, reply) as they come, until the deadline.

        A client whose node is gone is asked again when a node with its name appears.
        """
        deadline = time.monotonic() + timeout
        waiting: dict[str, str] = {}
        for client, request in requests.items():
            waiting[self._push(request, self.nodes[client], timeout)] = client
        while waiting and time.monotonic() < deadline:
            heard = False
            for message in self.grid.pull_messages(list(waiting)):
                client = waiting.pop(message.metadata.reply_to_message_id)
                heard = True
                yield client, _reply(message, requests[client], client)
            for joined in self._joined(deadline):
                lost = [m for m, client in waiting.items() if client == joined.client]
                for message_id in lost:
                    del waiting[message_id]
                if lost:
                    left = deadline - time.monotonic()
                    again = self._push(requests[joined.client], self.nodes[joined.client], left)
                    waiting[again] = joined.client
            if not heard:
                time.sleep(POLL_SECONDS)

    def _joined(self, deadline: float) -> Iterator[Reply]:
        """Replies of nodes that are new since the last call; keeps `nodes` up to date."""
        if self._join_request is None:
            return
        online = set(self.grid.get_node_ids())
        for node in sorted(online - self._asked):
            self._asked.add(node)
            left = max(deadline - time.monotonic(), 1.0)
            self._joining[self._push(self._join_request, node, left)] = node
        if not self._joining:
            return
        for message in self.grid.pull_messages(list(self._joining)):
            node = self._joining.pop(message.metadata.reply_to_message_id)
            reply = _reply(message, self._join_request, f"node {node}")
            known = self.nodes.get(reply.client)
            if reply.error is None and known is not None and known in online:
                # Asked again later: its other node may be one that was killed a moment ago.
                logger.warning("second node for client %s refused", reply.client)
                self._asked.discard(node)
                continue
            if reply.error is None:
                self.nodes[reply.client] = node
            yield reply

    def _push(self, request: Request, node: int, timeout: float) -> str:
        header, vector = request.pack()
        content = RecordDict({"message": ConfigRecord({"header": header})})
        if vector.size:
            content["arrays"] = ArrayRecord({"shared": Array(vector)})
        message = Message(
            content, node, MESSAGE_TYPES[request.kind], ttl=timeout, group_id=str(request.round)
        )
        pushed = list(self.grid.push_messages([message]))
        if len(pushed) != 1 or not pushed[0]:
            raise RunError(f"the message to node {node} could not be sent")
        return str(pushed[0])


def _reply(message: Message, request: Request, client: str) -> Reply:
    """The reply in a Flower message; an error of any kind becomes the reply's error."""
    if message.has_error():
        reason = f"Flower error {message.error.code}: {message.error.reason}"
        return failure(request.kind, request.round, client, RunError(reason))
    try:
        header = str(message.content["message"]["header"])
        arrays = message.content.get("arrays")
        vector = arrays["shared"].numpy() if arrays else np.zeros(0, dtype=np.float32)
        return Reply.unpack(header, vector)
    except (MessageError, KeyError, TypeError, ValueError) as error:
        return failure(
            request.kind, request.round, client, RunError(f"the reply cannot be read: {error}")
        )
