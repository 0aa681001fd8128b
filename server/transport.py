"""Clients behind Flower's grid: by name, one message per client and call, with deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from blend_core.errors import RunError
from blend_core.messages import MessageError, Reply, Request, failure

logger = logging.getLogger("blend.server")

POLL_SECONDS = 0.1
# Flower's error codes for a node that went offline before it replied.
NODE_GONE = (ErrorCode.NODE_UNAVAILABLE,)
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
        self._second: dict[int, Reply] = {}
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

        A client whose node is gone is waited for: when a node with its name appears, it is sent
        the same request again.
        """
        deadline = time.monotonic() + timeout
        sent = {self._push(request, self.nodes[c], timeout): c for c, request in requests.items()}
        gone: set[str] = set()
        while (sent or gone) and time.monotonic() < deadline:
            heard = False
            for message in self.grid.pull_messages(list(sent)):
                client = sent.pop(message.metadata.reply_to_message_id)
                if message.has_error() and message.error.code in NODE_GONE:
                    gone.add(client)
                    continue
                heard = True
                yield client, _reply(message, requests[client], client)
            for joined in self._joined(deadline):
                client = joined.client
                unanswered = [message_id for message_id, c in sent.items() if c == client]
                if joined.error is None and (unanswered or client in gone):
                    for message_id in unanswered:
                        del sent[message_id]
                    gone.discard(client)
                    left = deadline - time.monotonic()
                    sent[self._push(requests[client], self.nodes[client], left)] = client
            if not heard:
                time.sleep(POLL_SECONDS)

    def _joined(self, deadline: float) -> Iterator[Reply]:
        """Replies of nodes that are new since the last call; keeps `nodes` up to date.

        A name belongs to its node for as long as that is online. A second node with the name is
        kept in mind, for the first may have been killed a moment ago.
        """
        if self._join_request is None:
            return
        online = set(self.grid.get_node_ids())
        for node in sorted(online - self._asked):
            self._asked.add(node)
            left = max(deadline - time.monotonic(), 1.0)
            self._joining[self._push(self._join_request, node, left)] = node
        fresh = {}
        for message in self.grid.pull_messages(list(self._joining)) if self._joining else ():
            node = self._joining.pop(message.metadata.reply_to_message_id)
            fresh[node] = _reply(message, self._join_request, f"node {node}")
        for node, reply in {**self._second, **fresh}.items():
            self._second.pop(node, None)
            if node not in online:
                continue
            if reply.error is None and self.nodes.get(reply.client) in online:
                if node in fresh:
                    logger.warning("client %s has a living node; a second waits", reply.client)
                self._second[node] = reply
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
