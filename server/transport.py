"""Clients behind Flower's grid: by name, one message per client and call, with deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from blend_core.errors import RunError, described, one_line
from blend_core.messages import Reply, Request, failure
from server.identity import Identities, Node

logger = logging.getLogger("blend.server")

POLL_SECONDS = 0.1
# How often a client is sent one request again that was lost on the way to its reply.
REPETITIONS = 2
# Seconds; Flower refuses a message without time to live.
SHORTEST_TTL = 1.0
MESSAGE_TYPES = {"join": "query", "train": "train", "evaluate": "evaluate"}


@dataclass
class _Visit:
    """A node from when it is first seen until it goes offline or is started again.

    Attributes:
        info: what Flower says of the node.
        turned_away: it is never asked for anything.
        message: id of the request to join that it has not answered yet.
        lost: how often such a request was lost on the way to its reply.
        reply: its answer to the request to join.
        told: whether that answer has been handed on.
        admitted: it may be asked for more: it has joined, and fits.
        second: somebody was told that another node has its name.
    """

    info: Node
    turned_away: bool = False
    message: str | None = None
    lost: int = 0
    reply: Reply | None = None
    told: bool = False
    admitted: bool = False
    second: bool = False


class FlowerTransport:
    """Reaches clients by name over Flower's messages.

    A SuperNode without a registered key gets a new node id at every start, one with a key keeps
    its own; names stay in both cases. Every node that appears, or appears again, is asked to
    join, and the node that answered with a name is where that name's requests go.

    Args:
        grid: Flower's way to the nodes.
        identities: whose key may speak for which client; unset: any node for any.

    Attributes:
        nodes: client -> the node that last joined under its name; it may have gone since.
        unfit: why a client that joins, by its reply, may not take part; None: it may. Such a node
            is never asked for more.
        on_refused: told (who, why) of a node that may not take part, or not with its name; in
            `join` its reply is handed on instead where it is `unfit`.
        on_warning: told of what somebody should look after.
    """

    def __init__(self, grid: Grid, identities: Identities | None = None) -> None:
        self.grid = grid
        self.identities = identities
        self.nodes: dict[str, int] = {}
        self.unfit: Callable[[Reply], str | None] = lambda reply: None
        self.on_refused: Callable[[str, str], None] = _log_refusal
        self.on_warning: Callable[[str], None] = logger.warning
        # The nodes that are online.
        self._visits: dict[int, _Visit] = {}
        self._join_request: Request | None = None

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        """Ask every node that appears to join; yield a reply per node until the deadline."""
        self._join_request = request
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._look()
            yield from self._joined(deadline)
            time.sleep(POLL_SECONDS)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send the requests and yield (client asked, reply) as they come, until the deadline.

        A client whose node is gone is waited for: when that node is back, or another one appears
        with its name, it is sent the same request again. So is one whose ClientApp process died
        or whose message was dropped, `REPETITIONS` times at most: its round is done again from
        the same state, with the same result. A node that could not join for an error of its site
        gets another chance in every call.
        """
        deadline = time.monotonic() + timeout
        sent: dict[str, str] = {}
        repeated = dict.fromkeys(requests, 0)
        # Clients to send to, as soon as their node is there.
        due = set(requests)
        for visit in self._visits.values():
            if visit.told and visit.reply is not None and visit.reply.error is not None:
                visit.reply, visit.told = None, False
        while (sent or due) and time.monotonic() < deadline:
            self._look()
            for client in sorted(c for c in due if self._is_there(c)):
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
                if _expired(message) and deadline - time.monotonic() < SHORTEST_TTL:
                    continue
                if (lost := _lost(message)) and repeated[client] < REPETITIONS:
                    repeated[client] += 1
                    self.on_warning(f"{client}: {lost}; it is asked again")
                    due.add(client)
                    continue
                heard = True
                yield client, _reply(message, requests[client], client)
            for joined in self._joined(deadline):
                client = joined.client
                if joined.error is None and (reason := self.unfit(joined)) is not None:
                    self.on_refused(one_line(client, 80), one_line(reason))
                    continue
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

    def _is_there(self, client: str) -> bool:
        """Whether the client's node is online and has joined since it was started."""
        visit = self._visits.get(self.nodes[client])
        return visit is not None and visit.admitted

    def _look(self) -> None:
        """Bring `_visits` up to date: whoever was away or has started again is a new visitor."""
        online = {info.node_id: info for info in self.grid.get_nodes()}
        for node, visit in list(self._visits.items()):
            if node not in online or _started(online[node]) != _started(visit.info):
                del self._visits[node]
        for node in sorted(online.keys() - self._visits.keys()):
            visit = self._visits[node] = _Visit(online[node])
            reason = self.identities and self.identities.stranger(visit.info)
            if reason:
                visit.turned_away = True
                self.on_refused(_label(node), reason)

    def _joined(self, deadline: float) -> Iterator[Reply]:
        """Answers of nodes to the request to join, once each; keeps `nodes` up to date.

        A name belongs to its node for as long as that is online. A second node with the name has
        to wait, for the first may have been killed a moment ago. What a caller that stops early
        has not been told, the next one is.
        """
        if self._join_request is None:
            return
        for node, visit in sorted(self._visits.items()):
            if not visit.turned_away and visit.message is None and visit.reply is None:
                visit.message = self._push(self._join_request, node, deadline)
        asked = {visit.message: n for n, visit in self._visits.items() if visit.message}
        for message in self.grid.pull_messages(list(asked)) if asked else ():
            node = asked[message.metadata.reply_to_message_id]
            visit = self._visits[node]
            visit.message = None
            if _node_gone(message):
                continue
            if _lost(message) and visit.lost < REPETITIONS:
                visit.lost += 1
                continue
            reply = _reply(message, self._join_request, _label(node))
            if self._entitled(reply, node):
                visit.reply = reply
            else:
                visit.turned_away = True
        for node, visit in sorted(self._visits.items()):
            if visit.reply is None or visit.told:
                continue
            client = visit.reply.client
            if self.nodes.get(client, node) in self._visits.keys() - {node}:
                if not visit.second:
                    visit.second = True
                    self.on_warning(
                        f"{one_line(client, 80)}: a second SuperNode (node {node}) has this name; "
                        "it is not used as long as the first one is there"
                    )
                continue
            visit.told = True
            if visit.reply.error is None and self.unfit(visit.reply) is None:
                visit.admitted = True
                self.nodes[client] = node
                if self.identities is not None:
                    self.identities.bind(client, visit.info)
                    if (doubt := self.identities.doubt()) is not None:
                        self.on_warning(doubt)
            yield visit.reply

    def _entitled(self, reply: Reply, node: int) -> bool:
        """Whether a node may speak for the client that it names."""
        if self.identities is None or reply.client == _label(node):
            return True
        reason = self.identities.refusal(reply.client, self._visits[node].info)
        if reason is not None:
            self.on_refused(one_line(reply.client, 80), one_line(f"node {node}: {reason}"))
        return reason is None

    def _push(self, request: Request, node: int, deadline: float) -> str | None:
        """Send a request; None if the node has just signed off."""
        header, vector = request.pack()
        content = RecordDict({"message": ConfigRecord({"header": header})})
        if vector.size:
            content["arrays"] = ArrayRecord({"shared": Array(vector)})
        left = max(deadline - time.monotonic(), SHORTEST_TTL)
        message = Message(
            content, node, MESSAGE_TYPES[request.kind], ttl=left, group_id=str(request.round)
        )
        pushed = list(self.grid.push_messages([message]))
        if not pushed:  # Flower's word for a message that is too large; see `HttpGrid`.
            size = vector.nbytes + len(header)
            raise RunError(f"the SuperLink does not take a message of {size:,} bytes")
        return str(pushed[0]) if pushed[0] else None


def _started(info: Node) -> str:
    """What tells one start of a node from the next, where its id does not."""
    return str(info.last_activated_at)


def _label(node: int) -> str:
    """What a node is called that has told no name."""
    return f"node {node}"


def _log_refusal(who: str, reason: str) -> None:
    logger.warning("%s refused: %s", who, reason)


def _node_gone(message: Message) -> bool:
    """Whether Flower answers for a node that went offline before it replied."""
    return bool(message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE)


def _expired(message: Message) -> bool:
    """Whether Flower answers that the message's time to live is over."""
    codes = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return bool(message.has_error() and message.error.code in codes)


def _lost(message: Message) -> str | None:
    """Why Flower answers in place of a client that would do the same again; None if it doesn't."""
    if message.has_error() and message.error.code == ErrorCode.CLIENT_APP_CRASHED:
        return "its ClientApp process died"
    # Flower measures a time to live with the wall clock, which may have been set.
    return "Flower dropped the message before its deadline" if _expired(message) else None


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
