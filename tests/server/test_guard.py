"""The guard's catalogue: every kind of bad reply is refused, with the reason in words."""

from __future__ import annotations

import json

import numpy as np
import pytest

from blend_core import __version__
from blend_core.config import ServerConfig
from blend_core.messages import MessageError, Reply, Request
from server.guard import disagreement, refusal

SHAPES = {"text.1.up.weight": (4, 3), "vision.1.down.bias": (4,)}


def good_reply(**changes) -> Reply:
    shared = {name: np.ones(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    shared.update(changes.pop("shared", {}))
    fields = {"kind": "train", "round": 3, "client": "a", "train_images": 5}
    fields["version"] = __version__
    return Reply(**{**fields, **changes}, shared={k: v for k, v in shared.items() if v is not None})


REQUEST = Request(
    "train", "fed", 3, {}, shared={n: np.zeros(s, np.float32) for n, s in SHAPES.items()}
)


PART = {"manifest_sha256": "ab" * 32, "domain": None, "published": True}


def judge(reply: Reply, request: Request = REQUEST) -> str | None:
    limits = ServerConfig(max_images=1000, max_change=10.0)
    return refusal(reply, request, "a", {"proj.up.weight"}, limits)


def with_value(value: float) -> np.ndarray:
    array = np.ones((4, 3), dtype=np.float32)
    array[2, 1] = value
    return array


def test_a_good_reply_passes():
    assert judge(good_reply()) is None


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (good_reply(shared={"text.1.up.weight": with_value(np.nan)}), "not finite"),
        (good_reply(shared={"text.1.up.weight": with_value(np.inf)}), "not finite"),
        (good_reply(shared={"text.1.up.weight": with_value(-np.inf)}), "not finite"),
        (good_reply(shared={"vision.1.down.bias": None}), "missing, e.g. vision.1.down.bias"),
        (good_reply(shared={"other": np.ones(1, np.float32)}), "unknown, e.g. other"),
        (good_reply(shared={"proj.up.weight": np.ones(2, np.float32)}), "private tensors: proj.up"),
        (good_reply(shared={"text.1.up.weight": np.ones((3, 4), np.float32)}), r"shape \(3, 4\)"),
        (good_reply(shared={"text.1.up.weight": np.ones((1, 3), np.float32)}), r"shape \(1, 3\)"),
        (good_reply(shared={"vision.1.down.bias": np.ones((), np.float32)}), r"shape \(\)"),
        (good_reply(shared={"vision.1.down.bias": np.ones(4, np.float64)}), "dtype float64"),
        (good_reply(shared={"vision.1.down.bias": np.ones(4, np.int32)}), "dtype int32"),
        (good_reply(train_images=0), "training images is 0"),
        (good_reply(train_images=-5), "training images is -5"),
        (good_reply(train_images=1001), "training images is 1001"),
        (good_reply(train_images=2.5), "training images is 2.5"),
        (good_reply(train_images=True), "training images is True"),
        (good_reply(round=2), "train of round 2, asked was train of round 3"),
        (good_reply(kind="evaluate"), "answers evaluate"),
        (good_reply(version="0.0.9"), "version '0.0.9'"),
        (good_reply(client="mallory"), "claims to come from 'mallory'"),
        (good_reply(statistics={"counts": {"local": [1, 2]}}), "counts of right answers"),
        (
            good_reply(statistics={"counts": {g: [3, 2] for g in ("local", "base", "novel")}}),
            "counts of right answers",
        ),
        (good_reply(statistics={"train_span": ["x", 1]}), "train_span"),
        (good_reply(statistics={"train_span": [float("nan"), 1]}), "train_span"),
        (good_reply(statistics={"train_span": 5}), "train_span"),
        (good_reply(statistics={"training": {"loss": float("nan")}}), "training statistics"),
        (good_reply(statistics={"training": {"loss": "low"}}), "training statistics"),
        (good_reply(statistics={"training": [1]}), "training statistics"),
        (good_reply(statistics={"private_sha256": ["x"]}), "private_sha256"),
        (good_reply(statistics={"private_sha256": "x" * 101}), "private_sha256"),
        (good_reply(statistics={"backbone_sha256": 5}), "backbone_sha256"),
        (good_reply(statistics={"backbone_sha256": "x" * 101}), "backbone_sha256"),
        (good_reply(statistics={"data": "x"}), "description of its data"),
        (good_reply(statistics={"data": None}), "description of its data"),
        (good_reply(statistics={"data": {"domain": "dslr"}}), "description of its data"),
        (good_reply(statistics={"data": {"manifest_sha256": 5}}), "description of its data"),
        (good_reply(statistics={"data": {**PART, "manifest_sha256": ""}}), "description"),
        (good_reply(statistics={"data": {**PART, "manifest_sha256": "x" * 101}}), "description"),
        (good_reply(statistics={"data": {**PART, "domain": ["dslr"]}}), "description of its data"),
        (good_reply(statistics={"data": {**PART, "domain": "a\nb"}}), "description of its data"),
        (good_reply(statistics={"data": {**PART, "domain": "\u202etxt"}}), "description"),
        (good_reply(statistics={"data": {**PART, "domain": ""}}), "description of its data"),
        (good_reply(statistics={"worker": "x"}), "worker"),
        (good_reply(statistics={"worker": {"pid": [], "backbone_loads": 1}}), "worker"),
        (good_reply(statistics={"train_span": [10**400, 1]}), "train_span"),
        (good_reply(statistics={"train_span": {"0": 1}}), "train_span"),
        (
            good_reply(
                statistics={"counts": {g: [1, 10**400] for g in ("local", "base", "novel")}}
            ),
            "counts of right answers",
        ),
        (good_reply(train_images=10**30), "training images is 1000000"),
        (good_reply(statistics={"worker": {"pid": 1, "backbone_loads": True}}), "worker"),
    ],
)
def test_a_bad_reply_is_refused_with_its_reason(reply, reason):
    import re

    assert re.search(reason, judge(reply) or "accepted")


def counts(local):
    return {"local": local, "base": [1, 4], "novel": [0, 0]}


@pytest.mark.parametrize("text", ["\x1b[2Jgone\nINFO: all is well", "\u202ex" * 500_000])
@pytest.mark.parametrize(
    "told",
    [
        lambda text: {"version": text},
        lambda text: {"client": text},
        lambda text: {"train_images": text},
        lambda text: {"shared": {text: np.ones(1, np.float32)}},
        lambda text: {"statistics": {"counts": text}},
        lambda text: {"statistics": {"counts": counts([text, text])}},
        lambda text: {"statistics": {"train_span": text}},
        lambda text: {"statistics": {"evaluate_span": [text, text]}},
        lambda text: {"statistics": {"training": text}},
        lambda text: {"statistics": {"training": {text: text}}},
        lambda text: {"statistics": {"counts": counts([1, 4]), "training": {text: 0.5}}},
        lambda text: {"statistics": {"counts": counts([1, 4]), text: 0.5}},
        lambda text: {"statistics": {"private_sha256": text * 9}},
        lambda text: {"statistics": {"backbone_sha256": text * 9}},
        lambda text: {"statistics": {"data": text}},
        lambda text: {"statistics": {"data": {**PART, "domain": text}}},
        lambda text: {"statistics": {"worker": text}},
        lambda text: {"statistics": {"worker": {"pid": text}}},
    ],
    ids=[
        "version", "client", "images", "tensor", "counts", "count", "train span", "evaluate span",
        "training", "loss", "loss's name", "unknown", "private", "backbone", "data", "domain",
        "worker", "pid",
    ],
)  # fmt: skip
def test_a_site_cannot_paint_or_flood_the_servers_log(told, text):
    said = judge(good_reply(**told(text)))
    assert said
    assert said.isprintable()
    assert len(said) < 200


def test_a_backbone_s_hash_cannot_paint_the_servers_log():
    first, other = (
        good_reply(statistics={"data": PART, "backbone_sha256": text}, client="first")
        for text in ("aa", "\x1b[2J\n" * 20)
    )
    for said in (disagreement(other, first, None), disagreement(first, other, None)):
        assert "[2J [2J" in said
        assert said.isprintable()


def test_a_wrong_dtype_survives_the_wire_and_is_seen_by_the_guard():
    reply = good_reply(shared={"vision.1.down.bias": np.ones(4, np.float64)})
    assert "dtype float64" in (judge(Reply.unpack(*reply.pack())) or "")


COUNTS = {"local": [1, 2], "base": [1, 4], "novel": [0, 0]}


@pytest.mark.parametrize("kind", ["join", "evaluate"])
def test_other_replies_need_counts_and_carry_no_tensors(kind):
    request = Request(kind, "fed", 3, {}, shared=REQUEST.shared)
    nothing = dict.fromkeys(SHAPES)
    assert "no counts" in judge(good_reply(kind=kind, shared=nothing), request)
    counted = {"kind": kind, "statistics": {"counts": COUNTS}}
    assert judge(good_reply(**counted, shared=nothing), request) is None
    assert judge(good_reply(**counted, shared=nothing, train_images=0), request) is None
    assert "2 tensors are unknown" in judge(good_reply(**counted), request)


@pytest.mark.parametrize("domain", [None, "dslr", "Real World"])
def test_a_site_may_say_which_part_of_which_partition_it_holds(domain):
    assert judge(good_reply(statistics={"data": {**PART, "domain": domain}})) is None


def test_clients_of_another_partition_or_backbone_do_not_fit_the_first():
    first = good_reply(statistics={"data": PART, "backbone_sha256": "aa"}, client="first")
    assert disagreement(first, first, None) is None
    other = good_reply(statistics={"data": {**PART, "manifest_sha256": "c" * 64}})
    said = disagreement(other, first, None)
    assert said.startswith(
        f"its partition (SHA-256 {'c' * 12}) is not that of first ({'ab' * 6}); "
    )
    assert "partition" in disagreement(
        good_reply(statistics={"backbone_sha256": "aa"}), first, None
    )
    weights = good_reply(statistics={"data": PART, "backbone_sha256": "bb"})
    said = disagreement(weights, first, None)
    assert said.startswith("its backbone (SHA-256 bb) is not that of first")


def test_the_first_to_join_does_not_decide_what_the_server_knows_itself():
    wrong = good_reply(statistics={"data": PART}, client="wrong")
    right = good_reply(statistics={"data": {**PART, "manifest_sha256": "c" * 64}})
    assert disagreement(right, wrong, "c" * 64) is None
    assert "is not that of the server" in disagreement(wrong, wrong, "c" * 64)
    # Sites with folders of their own hold no part of a partition.
    plain = good_reply(statistics={})
    assert disagreement(plain, wrong, "") is None
    assert "its partition" in disagreement(wrong, wrong, "")


def test_a_round_that_asks_for_an_evaluation_needs_counts():
    request = Request("train", "fed", 3, {}, evaluate=True, shared=REQUEST.shared)
    assert "no counts" in judge(good_reply(), request)
    assert judge(good_reply(statistics={"counts": COUNTS}), request) is None


def test_a_change_beyond_all_measure_is_refused():
    # 16 values of 25 have the norm 100; sent was 0, so 10 is allowed.
    far = {name: np.full(shape, 25, np.float32) for name, shape in SHAPES.items()}
    assert "by 100 (L2 norm), allowed are 10" in judge(good_reply(shared=far))


@pytest.mark.parametrize(
    ("change", "vector"),
    [
        ({"layout": {"w": ["float32", [3]]}}, np.zeros(2, np.float32)),
        ({"layout": {"w": ["float32", [1]]}}, np.zeros(2, np.float32)),
        ({"layout": {"w": ["float32", [-1]]}}, np.zeros(2, np.float32)),
        ({"layout": {"w": ["object", [2]]}}, np.zeros(2, np.float32)),
        ({"layout": {"w": ["S1000000000", [2]]}}, np.zeros(2, np.float32)),
        ({"layout": ["w"]}, np.zeros(2, np.float32)),
        ({"kind": "explode"}, np.zeros(0, np.float32)),
        ({"round": "1"}, np.zeros(0, np.float32)),
        ({"statistics": []}, np.zeros(0, np.float32)),
        ({"surprise": 1}, np.zeros(0, np.float32)),
        ({"layout": {"a": []}}, np.zeros(0, np.float32)),
        ({"layout": {"a": ""}}, np.zeros(0, np.float32)),
        ({"layout": {"a": ["(1,f4", [1]]}}, np.zeros(1, np.float32)),
        ({"layout": {"a": ["float32", []]}}, np.float32(1.0)),
        ({"layout": {"a": ["float32", [1]]}}, np.zeros(1, np.complex64)),
        ({"statistics": {"loss": float("nan")}}, np.zeros(0, np.float32)),
        ({"train_images": float("inf")}, np.zeros(0, np.float32)),
        ({"client": "\ud800"}, np.zeros(0, np.float32)),
        ({"round": True}, np.zeros(0, np.float32)),
        ({"error": ""}, np.zeros(0, np.float32)),
        ({"error": "\u200b \n"}, np.zeros(0, np.float32)),
        ({"client": "x" * 5_000_000}, np.zeros(0, np.float32)),
    ],
)
def test_headers_that_make_no_sense_are_malformed_messages(change, vector):
    header = json.loads(Reply("train", 1, "a").pack()[0])
    with pytest.raises(MessageError):
        Reply.unpack(json.dumps({**header, **change}), vector)


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000, '{"a":' * 100_000, "1" * 9999])
def test_text_that_is_no_header_is_a_malformed_message(text):
    with pytest.raises(MessageError) as caught:
        Reply.unpack(text, np.zeros(0, np.float32))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ["pid", "backbone_loads"])
@pytest.mark.parametrize("value", [-1, 2**31, 10**4000])
def test_numbers_that_no_results_file_could_hold_are_refused(key, value):
    worker = {"pid": 1, "backbone_loads": 1, key: value}
    assert judge(good_reply(statistics={"worker": worker})).startswith("its worker is ")
