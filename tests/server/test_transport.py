"""Clients behind Flower's grid: names, restarts, late replies, broken replies."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice, repeat

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from blend_core.messages import Reply, Request
from server.transport import FlowerTransport


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower's processes know of themselves; messages cannot be made without it."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Nodes are functions from a request to a list of replies' contents; [] is silence."""

    def __init__(self, nodes):
        self.nodes = dict(nodes)
        self.replies: dict[str, Message] = {}
        self.sent: list[tuple[int, str]] = []

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            message_id = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.sent.append((node, message.metadata.message_type))
            content = message.content
            arrays = content.get("arrays")
            vector = arrays["shared"].numpy() if arrays else np.zeros(0, np.float32)
            request = Request.unpack(str(content["message"]["header"]), vector)
            answer = self.nodes[node](request) if node in self.nodes else None
            if answer is not None:
                self.replies[message_id] = Message(answer, reply_to=message)
            ids.append(message_id)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(i) for i in list(ids) if i in self.replies]


def content(reply: Reply) -> RecordDict:
    header, vector = reply.pack()
    record = RecordDict({"message": ConfigRecord({"header": header})})
    if vector.size:
        record["arrays"] = ArrayRecord({"shared": Array(vector)})
    return record


def named(name: str):
    def node(request: Request) -> RecordDict:
        shared = {k: v + 1 for k, v in request.shared.items()}
        return content(Reply(request.kind, request.round, name, "0", 1, {}, shared=shared))

    return node


JOIN = Request("join", "fed", 0, {})


def train(round: int) -> Request:
    return Request("train", "fed", round, {}, shared={"w": np.float32([1, 2])})


def joined(transport: FlowerTransport, wanted: int, timeout: float = 5.0) -> list[str]:
    """Names of the first `wanted` clients that join."""
    return sorted(r.client for r in islice(transport.join(JOIN, timeout), wanted))


def test_nodes_join_and_are_asked_by_name():
    grid = Grid({11: named("b"), 7: named("a")})
    transport = FlowerTransport(grid)
    assert joined(transport, 2) == ["a", "b"]
    replies = dict(transport.ask({"b": train(1)}, 5.0))
    assert replies["b"].shared["w"].tolist() == [2, 3]
    assert grid.sent[-1] == (11, "train")


def test_a_second_node_with_a_living_name_is_not_taken():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    assert joined(transport, 1) == ["a"]
    grid.nodes[2] = named("a")
    assert joined(transport, 2, timeout=0.3) == []
    assert transport.nodes == {"a": 1}


def test_a_client_that_comes_back_as_another_node_is_asked_again_in_the_same_round():
    grid = Grid({1: named("a"), 2: named("b")})
    transport = FlowerTransport(grid)
    joined(transport, 2)
    grid.nodes[1] = lambda request: None
    replies = transport.ask({"a": train(1), "b": train(1)}, 5.0)
    assert next(replies)[0] == "b"
    del grid.nodes[1]
    grid.nodes[3] = named("a")
    client, reply = next(replies)
    assert (client, reply.error) == ("a", None)
    assert transport.nodes["a"] == 3


def test_a_client_whose_node_went_offline_is_waited_for_not_refused():
    """Flower answers for a dead node with an error; that must not cost the client its round."""
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    grid.nodes[1] = lambda request: Error(code=ErrorCode.NODE_UNAVAILABLE, reason="offline")
    replies = transport.ask({"a": train(1)}, 5.0)
    # A node with its name waits until the first is known to be offline.
    grid.nodes[2] = named("a")
    online = chain([{1, 2}] * 6, repeat({2}))
    grid.get_node_ids = lambda: next(online)
    client, reply = next(replies)
    assert (client, reply.error, reply.shared["w"].tolist()) == ("a", None, [2, 3])
    assert grid.sent.count((2, "query")) == 1


def test_silence_ends_at_the_deadline_and_a_late_reply_is_ignored():
    held: list[RecordDict] = []

    def slow(request: Request) -> RecordDict | None:
        return named("a")(request) if request.kind == "join" or request.round == 2 else None

    grid = Grid({1: slow})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    assert list(transport.ask({"a": train(1)}, 0.3)) == []
    held.append(named("a")(train(1)))
    late = Message(held[0], dst_node_id=0, message_type="train")
    late.metadata.__dict__["_reply_to_message_id"] = "m1"
    grid.replies["m1"] = late
    replies = list(transport.ask({"a": train(2)}, 5.0))
    assert [(c, r.round) for c, r in replies] == [("a", 2)]


def test_replies_that_cannot_be_read_become_errors_not_crashes():
    answers = {
        "no header": RecordDict({}),
        "no json": RecordDict({"message": ConfigRecord({"header": "{"})}),
        "wrong layout": RecordDict(
            {
                "message": ConfigRecord({"header": Reply("train", 1, "a").pack()[0]}),
                "arrays": ArrayRecord({"shared": Array(np.ones(3, np.float32))}),
            }
        ),
        "other array": RecordDict(
            {
                "message": ConfigRecord({"header": Reply("train", 1, "a").pack()[0]}),
                "arrays": ArrayRecord({"else": Array(np.ones(3, np.float32))}),
            }
        ),
        **{
            what: RecordDict(
                {
                    "message": ConfigRecord({"header": Reply("train", 1, "a").pack()[0]}),
                    "arrays": ArrayRecord(
                        {"shared": Array("float32", (1,), "numpy.ndarray", data)}
                    ),
                }
            )
            for what, data in {
                "no bytes": b"",
                "zip": b"PK\x03\x04junk",
                "huge": b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, "
                b"'shape': (999999999999,), }    \n",
                "no numpy header": b"\x93NUMPY\x01\x00\x04\x00{'de",
            }.items()
        },
        "arrays that are none": RecordDict(
            {
                "message": ConfigRecord({"header": Reply("train", 1, "a").pack()[0]}),
                "arrays": ConfigRecord({"shared": 1}),
            }
        ),
        "broken bytes": RecordDict(
            {
                "message": ConfigRecord({"header": Reply("train", 1, "a").pack()[0]}),
                "arrays": ArrayRecord(
                    {"shared": Array("float32", (1,), "numpy.ndarray", b"garbage")}
                ),
            }
        ),
    }
    for what, answer in answers.items():
        grid = Grid({1: named("a")})
        transport = FlowerTransport(grid)
        joined(transport, 1)
        grid.nodes[1] = lambda request, answer=answer: answer
        ((client, reply),) = transport.ask({"a": train(1)}, 5.0)
        assert client == "a", what
        assert reply.error, what
        assert "\n" not in reply.error, what


def test_flowers_own_errors_are_told():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    grid.nodes[1] = lambda request: Error(code=2, reason="the app crashed")
    ((_, reply),) = transport.ask({"a": train(1)}, 5.0)
    assert "the app crashed" in reply.error


def test_a_node_that_was_offline_for_a_moment_is_asked_again():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    answers = iter([Error(code=ErrorCode.NODE_UNAVAILABLE, reason="offline")])
    grid.nodes[1] = lambda request: next(answers, None) or named("a")(request)
    ((client, reply),) = transport.ask({"a": train(1)}, 5.0)
    assert (client, reply.error) == ("a", None)


def test_a_node_that_signed_off_is_waited_for_and_ends_nothing():
    """Flower pushes nothing to a node that has unregistered."""
    grid = Grid({1: named("a"), 2: named("b")})
    transport = FlowerTransport(grid)
    joined(transport, 2)
    push = grid.push_messages
    grid.push_messages = lambda ms: push(ms) if ms[0].metadata.dst_node_id != 1 else [None]
    replies = dict(transport.ask({"a": train(1), "b": train(1)}, 0.5))
    assert list(replies) == ["b"]


def test_the_error_of_a_site_that_comes_back_is_told_in_its_round():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    del grid.nodes[1]
    grid.nodes[2] = lambda request: content(
        Reply(request.kind, request.round, "a", "0", error="E01 no folder", exit_code=3)
    )
    ((client, reply),) = transport.ask({"a": train(1)}, 5.0)
    assert (client, reply.error, reply.exit_code) == ("a", "E01 no folder", 3)
