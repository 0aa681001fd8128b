"""Clients behind Flower's grid: by name, one message per client and call, with deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from blend_core.errors import RunError, described
from blend_core.messages import Reply, Request, failure

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
        self._second: dict[int, Reply] = {}
        self._join_request: Request | None = None

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        """Ask every node that appears to join; yield a reply per node until the deadline."""
        self._join_request = request
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            yield from self._joined(deadline)
            time.sleep(POLL_SECONDS)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send the requests and yield (client asked, reply) as they come, until the deadline.

        A client whose node is gone is waited for: when that node is back, or another one appears
        with its name, it is sent the same request again.
        """
        deadline = time.monotonic() + timeout
        sent: dict[str, str] = {}
        # Clients to send to, as soon as their node is there.
        due = set(requests)
        while (sent or due) and time.monotonic() < deadline:
            # Asked only while someone is due: `_joined` asks Flower the same in every pass.
            online = set(self.grid.get_node_ids()) if due else set()
            for client in sorted(c for c in due if self.nodes[c] in online):
                message_id = self._push(requests[client], self.nodes[client], deadline)
                if message_id is not None:
                    sent[message_id] = client
                    due.discard(client)
            heard = False
            for message in self.grid.pull_messages(list(sent)) if sent else ():
                client = sent.pop(message.metadata.reply_to_message_id)
                if _node_gone(message):
                    due.add(client)
                    continue
                heard = True
                yield client, _reply(message, requests[client], client)
            for joined in self._joined(deadline):
                client = joined.client
                unanswered = [message_id for message_id, c in sent.items() if c == client]
                if client not in due and not unanswered:
                    continue
                for message_id in unanswered:
                    del sent[message_id]
                if joined.error is None:
                    due.add(client)
                else:
                    due.discard(client)
                    heard = True
                    yield client, joined
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
            message_id = self._push(self._join_request, node, deadline)
            if message_id is not None:
                self._asked.add(node)
                self._joining[message_id] = node
        fresh = {}
        for message in self.grid.pull_messages(list(self._joining)) if self._joining else ():
            node = self._joining.pop(message.metadata.reply_to_message_id)
            if _node_gone(message):
                self._asked.discard(node)
            else:
                fresh[node] = _reply(message, self._join_request, f"node {node}")
        for node, reply in {**self._second, **fresh}.items():
            self._second.pop(node, None)
            if node not in online:
                continue
            if reply.error is None and self.nodes.get(reply.client, node) in online - {node}:
                if node in fresh:
                    logger.warning("client %s has a living node; a second waits", reply.client)
                self._second[node] = reply
                continue
            if reply.error is None:
                self.nodes[reply.client] = node
            yield reply

    def _push(self, request: Request, node: int, deadline: float) -> str | None:
        """Send a request; None if the node has just signed off."""
        header, vector = request.pack()
        content = RecordDict({"message": ConfigRecord({"header": header})})
        if vector.size:
            content["arrays"] = ArrayRecord({"shared": Array(vector)})
        # Flower refuses a message without time to live.
        left = max(deadline - time.monotonic(), 1.0)
        message = Message(
            content, node, MESSAGE_TYPES[request.kind], ttl=left, group_id=str(request.round)
        )
        (pushed,) = list(self.grid.push_messages([message])) or (None,)
        return str(pushed) if pushed else None


def _node_gone(message: Message) -> bool:
    """Whether Flower answers for a node that went offline before it replied."""
    return bool(message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE)


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
    except Exception as error:  # Whatever a client sent, the server goes on.
        why = f"the reply cannot be read: {described(error)}"
        return failure(request.kind, request.round, client, RunError(why))
