"""Clients behind Flower's grid: names, restarts, late replies, broken replies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity

from blend_core.errors import RunError, SiteError
from blend_core.messages import Reply, Request, failure
from blend_core.state import StateError
from server.identity import IDENTITIES, Identities, fingerprint
from server.transport import FlowerTransport


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower's processes know of themselves; messages cannot be made without it."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@cache
def public_key(node: int) -> bytes:
    return public_key_to_bytes(generate_key_pairs()[1])


class Grid:
    """Nodes are functions from a request to a list of replies' contents; [] is silence."""

    def __init__(self, nodes, registered=()):
        self.nodes = dict(nodes)
        # Names under which keys were registered; other nodes registered themselves.
        self.registered = dict(registered)
        # When nodes were started; who has a registered key keeps its id over restarts.
        self.activated: dict[int, str] = {}
        self.replies: dict[str, Message] = {}
        self.sent: list[tuple[int, str]] = []

    def get_nodes(self) -> list[NodeInfo]:
        """What Flower's Runtime API answers; every node has a key of its own."""
        return [
            NodeInfo(
                node_id=n,
                name=self.registered.get(n),
                public_key=public_key(n),
                last_activated_at=self.activated.get(n, ""),
            )
            for n in self.nodes
        ]

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


DIED = Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding.")
DROPPED = Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable")


def loses(error: Error, times: int, kind: str):
    """A node for which Flower answers requests of a kind with an error, so many times."""
    left = [error] * times

    def node(request: Request) -> RecordDict | Error:
        return left.pop() if request.kind == kind and left else named("a")(request)

    return node


@pytest.mark.parametrize(
    ("error", "told_as"),
    [
        (DIED, "its ClientApp process died"),
        (DROPPED, "Flower dropped the message before its deadline"),
    ],
)
@pytest.mark.parametrize("kind", ["join", "train"])
def test_a_client_whose_message_was_lost_is_asked_again_and_not_for_ever(error, told_as, kind):
    transport = FlowerTransport(Grid({1: loses(error, 2, kind)}))
    told: list[str] = []
    transport.on_warning = told.append
    assert joined(transport, 1) == ["a"]
    ((_, reply),) = transport.ask({"a": train(1)}, 5.0)
    assert reply.shared["w"].tolist() == [2, 3]
    assert told == ([f"a: {told_as}; it is asked again"] * 2 if kind == "train" else [])
    transport = FlowerTransport(Grid({1: loses(error, 3, kind)}))
    if kind == "join":
        assert joined(transport, 1) == ["node 1"]
        return
    assert joined(transport, 1) == ["a"]
    ((_, reply),) = transport.ask({"a": train(1)}, 5.0)
    assert reply.error == f"Flower error {error.code}: {error.reason}"


def test_a_message_that_expires_at_the_deadline_is_silence():
    """Its client is absent, not refused."""
    grid = Grid({1: loses(DROPPED, 1, "train")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    assert list(transport.ask({"a": train(1)}, 0.5)) == []
    assert grid.sent.count((1, "train")) == 1


def test_a_second_node_with_a_living_name_is_not_taken():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    told: list[str] = []
    transport.on_warning = told.append
    assert joined(transport, 1) == ["a"]
    grid.nodes[2] = named("a")
    assert joined(transport, 2, timeout=0.3) == []
    assert transport.nodes == {"a": 1}
    assert told == [
        "a: a second SuperNode (node 2) has this name; it is not used as long as the first one is "
        "there"
    ]


def test_a_second_node_with_an_error_does_not_end_the_round_of_the_living_one():
    lock = failure("join", 0, "a", SiteError("state is used by process 7"))
    asked = []

    def slow(request: Request) -> RecordDict | None:
        """Answers once the second node has told its error."""
        asked.append(request.kind)
        return named("a")(request) if request.kind == "join" else None

    grid = Grid({1: slow})
    transport = FlowerTransport(grid)
    assert joined(transport, 1) == ["a"]
    grid.nodes[2] = lambda request: content(lock)
    assert list(transport.ask({"a": train(1)}, 0.5)) == []  # Nobody speaks for it.
    grid.nodes[1] = named("a")
    replies = dict(transport.ask({"a": train(2)}, 5.0))
    assert replies["a"].error is None
    # Once the first one has gone, the second one's word is the client's.
    del grid.nodes[1]
    replies = dict(transport.ask({"a": train(3)}, 5.0))
    assert "is used by process 7" in replies["a"].error


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
    everybody = grid.get_nodes
    grid.get_nodes = lambda: [i for now in [next(online)] for i in everybody() if i.node_id in now]
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


def test_a_node_that_joins_in_mid_run_is_asked_only_if_it_fits():
    grid = Grid({1: named("a"), 2: named("b")})
    transport = FlowerTransport(grid)
    refused: list[str] = []
    transport.on_refused = lambda who, why: refused.append(f"{who}: {why}")
    joined(transport, 2)
    transport.unfit = lambda reply: "its backbone is another" if reply.client == "a" else None
    del grid.nodes[1], grid.nodes[2]
    grid.nodes |= {3: named("a"), 4: named("b")}
    replies = dict(transport.ask({"a": train(1), "b": train(1)}, 1.0))
    assert list(replies) == ["b"]
    assert refused == ["a: its backbone is another"]
    assert (3, "train") not in grid.sent
    assert transport.nodes == {"a": 1, "b": 4}
    # Its place is still free for the right one.
    transport.unfit = lambda reply: None
    grid.nodes[5] = named("a")
    assert list(dict(transport.ask({"a": train(2)}, 5.0))) == ["a"]
    assert transport.nodes["a"] == 5


def fails_to_join(name: str, times: int):
    """A node whose site has trouble at its first requests to join."""
    left = [failure("join", 0, name, SiteError("out of memory in loading"))] * times

    def node(request: Request) -> RecordDict:
        return content(left.pop()) if request.kind == "join" and left else named(name)(request)

    return node


def test_a_client_that_came_back_with_an_error_has_another_chance_in_the_next_round():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    del grid.nodes[1]
    grid.nodes[2] = fails_to_join("a", 2)
    for round in (1, 2):
        ((_, reply),) = transport.ask({"a": train(round)}, 5.0)
        assert reply.error == "out of memory in loading"
    ((_, reply),) = transport.ask({"a": train(3)}, 5.0)
    assert (reply.error, reply.shared["w"].tolist()) == (None, [2, 3])
    assert grid.sent.count((2, "query")) == 3


def test_a_node_that_is_started_again_under_its_id_is_asked_to_join_again():
    """With a registered key; its operator has corrected what it was refused for."""
    grid = Grid({1: fails_to_join("a", 1)})
    grid.activated[1] = "10:00"
    transport = FlowerTransport(grid)
    replies = transport.join(JOIN, 5.0)
    assert next(replies).error == "out of memory in loading"
    grid.activated[1] = "10:05"
    assert next(replies).error is None
    # In mid-run it is judged again before it is asked for anything.
    grid.activated[1] = "10:10"
    transport.unfit = lambda reply: "its partition is another"
    refused: list[str] = []
    transport.on_refused = lambda who, why: refused.append(f"{who}: {why}")
    assert list(transport.ask({"a": train(1)}, 0.5)) == []
    assert refused == ["a: its partition is another"]
    assert (1, "train") not in grid.sent
    # Also where it was away for a moment and Flower does not say since when it is back.
    transport.unfit = lambda reply: None
    info = grid.nodes.pop(1)
    assert list(transport.ask({"a": train(2)}, 0.3)) == []
    grid.nodes[1] = info
    assert list(dict(transport.ask({"a": train(3)}, 5.0))) == ["a"]


def test_what_nobody_was_told_when_the_federation_had_formed_is_not_forgotten():
    grid = Grid({1: named("a"), 2: named("b"), 3: named("c")})
    transport = FlowerTransport(grid)
    # All three answers have come when the coordinator has enough.
    assert joined(transport, 1) == ["a"]
    del grid.nodes[1]
    grid.nodes[4] = named("a")
    assert list(dict(transport.ask({"a": train(1)}, 5.0))) == ["a"]
    assert transport.nodes == {"a": 4, "b": 2, "c": 3}
    assert grid.sent.count((2, "query")) == grid.sent.count((3, "query")) == 1


def test_a_message_that_is_too_large_ends_the_wait_with_its_size():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    joined(transport, 1)
    grid.push_messages = lambda messages: []  # What Flower's grid makes of HTTP 413.
    with pytest.raises(RunError, match=r"the SuperLink does not take a message of \d+ bytes"):
        list(transport.ask({"a": train(1)}, 5.0))


def test_a_node_that_does_not_fit_takes_no_name_when_the_federation_forms():
    grid = Grid({1: named("a")})
    transport = FlowerTransport(grid)
    transport.unfit = lambda reply: "its backbone is another"
    assert joined(transport, 1) == ["a"]  # For the coordinator, which refuses it.
    transport.unfit = lambda reply: None
    grid.nodes[2] = named("a")
    assert joined(transport, 1) == ["a"]
    assert transport.nodes == {"a": 2}


# Names and keys


def keyed(grid: Grid, folder: Path, required: bool = False) -> tuple[FlowerTransport, list[str]]:
    """A transport that binds names to keys, and what it refuses, as it comes."""
    transport = FlowerTransport(grid, Identities(folder, required))
    refused: list[str] = []
    transport.on_refused = lambda who, why: refused.append(f"{who}: {why}")
    return transport, refused


def test_a_name_is_bound_to_the_key_that_first_used_it_and_the_binding_outlives_the_run(tmp_path):
    grid = Grid({1: named("a")}, {1: "a"})
    transport, refused = keyed(grid, tmp_path)
    assert joined(transport, 1) == ["a"]
    bound = {"a": fingerprint(public_key(1))}
    assert json.loads((tmp_path / IDENTITIES).read_text()) == bound
    # The resumed run: the owner is away, and another registered key claims its name.
    grid = Grid({2: named("a")}, {2: "a"})
    transport, refused = keyed(grid, tmp_path)
    assert joined(transport, 1, timeout=0.3) == []
    assert refused[0].startswith(f"a: node 2: its key is {fingerprint(public_key(2))}, but")
    assert bound["a"] in refused[0]
    # It was refused once, not at every look, and has changed nothing.
    assert len(refused) == 1
    grid.nodes[1], grid.registered[1] = named("a"), "a"
    assert joined(transport, 1) == ["a"]
    assert transport.nodes == {"a": 1}
    assert json.loads((tmp_path / IDENTITIES).read_text()) == bound


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_key_without_a_name_among_keys_with_names_is_told_once(tmp_path, first):
    grid = Grid({1: named(first)}, {1: first} if first == "a" else {})
    transport, refused = keyed(grid, tmp_path)
    told: list[str] = []
    transport.on_warning = told.append
    assert joined(transport, 1) == [first]
    assert told == []
    second = {"a": "b", "b": "a"}[first]
    grid.nodes[2] = named(second)
    grid.registered |= {2: "a"} if second == "a" else {}
    assert joined(transport, 1) == [second]
    grid.nodes[3], grid.registered[3] = named("c"), "c"
    assert joined(transport, 1) == ["c"]
    (warning,) = told
    assert warning.startswith("b: the key is not registered by name as those of others are")
    assert refused == []


def test_a_registered_key_speaks_for_its_own_name_only(tmp_path):
    grid = Grid({1: named("b")}, {1: "a"})
    transport, refused = keyed(grid, tmp_path)
    assert joined(transport, 1, timeout=0.3) == []
    assert refused == ["b: node 1: its key is registered for a"]
    assert not (tmp_path / IDENTITIES).exists()


def test_another_key_cannot_take_over_in_mid_round_not_even_with_an_error(tmp_path):
    grid = Grid({1: named("a")}, {1: "a"})
    transport, refused = keyed(grid, tmp_path)
    joined(transport, 1)
    del grid.nodes[1]

    def failing(request: Request) -> RecordDict:
        return content(Reply(request.kind, request.round, "a", "0", error="no folder"))

    grid.nodes |= {2: named("a"), 3: named("a"), 4: failing}
    grid.registered |= {3: "a", 4: "a"}  # Node 2 has registered itself.
    assert list(transport.ask({"a": train(1)}, 0.5)) == []
    assert [who.split(":")[1] for who in sorted(refused)] == [" node 2", " node 3", " node 4"]
    assert "this node has none" in min(refused)
    assert not [node for node, kind in grid.sent if kind == "train"]


def test_without_registered_keys_a_restarted_node_gets_its_name_back(tmp_path):
    grid = Grid({1: named("a")})
    transport, refused = keyed(grid, tmp_path)
    joined(transport, 1)
    del grid.nodes[1]
    grid.nodes[2] = named("a")
    ((client, reply),) = transport.ask({"a": train(1)}, 5.0)
    assert (client, reply.error, refused) == ("a", None, [])
    assert not (tmp_path / IDENTITIES).exists()


def test_where_keys_are_required_others_are_not_even_sent_the_settings(tmp_path):
    grid = Grid({1: named("a"), 2: named("b")}, {2: "b"})
    transport, refused = keyed(grid, tmp_path, required=True)
    assert joined(transport, 2, timeout=0.3) == ["b"]
    assert grid.sent == [(2, "query")]
    assert len(refused) == 1
    assert refused[0].startswith("node 1: server.require_keys: ")
    assert "flwr supernode register" in refused[0]


def test_a_damaged_file_of_names_and_keys_is_named_not_replaced(tmp_path):
    for text in ("", "[]", '{"a": 1}', "{"):
        (tmp_path / IDENTITIES).write_text(text)
        with pytest.raises(StateError, match=IDENTITIES):
            Identities(tmp_path, False)
        assert (tmp_path / IDENTITIES).read_text() == text
