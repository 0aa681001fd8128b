"""Hostile and broken replies, for every method: each is refused by name, the round goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matrix import ROWS
from scripted import Client, Scripted, events, honest

from blend_core.config import ServerConfig, parse_experiment
from blend_core.messages import Reply, Request
from server.aggregation import weighted_mean
from server.checkpoints import Checkpoints
from server.guard import outliers
from server.strategy import Coordinator

TRAINED = sorted(set(ROWS) - {"zero-shot"})
Spoil = Callable[[Reply, Request], None]


def first(reply: Reply) -> str:
    return min(reply.shared)


def spoil_value(value: float) -> Spoil:
    def spoil(reply: Reply, request: Request) -> None:
        reply.shared[first(reply)].reshape(-1)[0] = value

    return spoil


def scale(factor: float) -> Spoil:
    """Changes `factor` times as far as an honest client of one image."""

    def spoil(reply: Reply, request: Request) -> None:
        for name, value in request.shared.items():
            reply.shared[name] = value + np.float32(factor)

    return spoil


def put(name: str, value: object) -> Spoil:
    return lambda reply, request: setattr(reply, name, value)


def told(key: str, value: object) -> Spoil:
    return lambda reply, request: reply.statistics.update({key: value})


def tensor(make: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    def spoil(reply: Reply, request: Request) -> None:
        reply.shared[first(reply)] = make(reply.shared[first(reply)])

    return spoil


# Name of the client -> how it spoils an honest reply, and what the reason says.
CATALOGUE: dict[str, tuple[Spoil, str]] = {
    "key-missing": (lambda reply, request: reply.shared.pop(first(reply)), "1 shared tensors are"),
    "keys-none": (lambda reply, request: reply.shared.clear(), "shared tensors are missing"),
    "key-unknown": (
        lambda reply, request: reply.shared.update(other=np.ones(1, np.float32)),
        "1 tensors are unknown, e.g. other",
    ),
    "shape": (tensor(lambda value: value.reshape(-1)[:-1]), "has shape"),
    "shape-more": (tensor(lambda value: value[None]), "has shape"),
    "dtype": (tensor(lambda value: value.astype(np.float64)), "has dtype float64"),
    "nan": (spoil_value(np.nan), "not finite"),
    "infinite": (spoil_value(-np.inf), "not finite"),
    "count-none": (put("train_images", 0), "number of training images is 0"),
    "count-huge": (put("train_images", 10**9), "number of training images is 1000000000"),
    "round": (put("round", 7), "answers train of round 7"),
    "kind": (put("kind", "evaluate"), "answers evaluate"),
    "name": (put("client", "good-0"), "claims to come from 'good-0'"),
    "version": (put("version", "0.0.1"), "runs version '0.0.1'"),
    "norm": (scale(1e9), r"L2 norm\), allowed are \S+$"),
    "outlier": (scale(50.0), "server.max_change_ratio"),
    "error": (put("error", "no memory"), "no memory"),
    "counts-null": (told("counts", None), "counts of right answers are None"),
    "hash-painted": (told("private_sha256", "\x1b[2J"), "private_sha256 is not a short text"),
    "hash-null": (told("private_sha256", None), "private_sha256 is not a short text"),
    "unknown": (told("secret", 1), "statistics hold something unknown: secret"),
    "cold-start": (told("cold_start", {"lost": 1, "used": 0}), "cold start that it may not make"),
}


def spoiled(spoil: Spoil) -> Client:
    def client(name: str, request: Request) -> Reply | None:
        reply = honest(1)(name, request)
        if request.kind != "train":
            return reply
        spoil(reply, request)
        return reply

    return client


def silent(name: str, request: Request) -> Reply | None:
    return None if request.kind == "train" else honest(1)(name, request)


@pytest.fixture
def run(tower, tmp_path):
    def build(method: str, bad: dict[str, Client], **server) -> Coordinator:
        who = {"good-0": honest(1), "good-1": honest(2), "good-2": honest(3)}
        who |= bad
        experiment = parse_experiment(
            {
                "rounds": 1,
                "clients": len(who),
                "method": {"name": method, **ROWS[method].small},
                "backbone": tower("tower_a").model_dump(),
                "data": {"kind": "folders"},
                "server": {"max_change": 1e6, "max_change_ratio": 10.0, **server},
            }
        )
        return Coordinator(experiment, Scripted(who), tmp_path, "fed", "scripted")

    return build


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("method", TRAINED)
def test_every_bad_reply_is_refused_with_its_reason(run, tmp_path, method):
    bad = {name: spoiled(spoil) for name, (spoil, _) in CATALOGUE.items()}
    reasons = {name: pattern for name, (_, pattern) in CATALOGUE.items()}
    reasons |= {"silent": "no reply within", "private": "carries private tensors"}
    coordinator = run(method, {**bad, "silent": silent, "private": silent})
    secret = min(coordinator.method.private(), default="")
    if not secret:
        secret, reasons["private"] = "secret", "tensors are unknown, e.g. secret"
    one = np.ones(1, np.float32)
    coordinator.transport.clients["private"] = spoiled(
        lambda reply, request: reply.shared.update({secret: one})
    )
    start = {n: p.detach().numpy().copy() for n, p in coordinator.method.shared().items()}
    coordinator.run()
    found = results(tmp_path)["refusals"]
    assert sorted(found) == sorted(reasons)
    for name, pattern in reasons.items():
        status, other = ("absent", "refused") if name == "silent" else ("refused", "absent")
        assert (found[name][status], found[name][other]) == ([1], []), name
        ((reason, often),) = found[name]["reasons"].items()
        assert re.search(pattern, reason), (name, reason)
        assert often == 1
    # What is left is the mean of the honest.
    uploads = {f"good-{n - 1}": {k: v + np.float32(n) for k, v in start.items()} for n in (1, 2, 3)}
    expected = weighted_mean(uploads, {"good-0": 1, "good-1": 2, "good-2": 3})
    shared = Checkpoints(tmp_path).load(1).shared
    assert all((shared[name] == value).all() for name, value in expected.items())
    told = {e["client"] for e in events(tmp_path) if e["event"] in ("refused", "absent")}
    assert told == set(reasons)


def test_a_method_without_training_refuses_bad_evaluations(run, tmp_path):
    def liar(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        if request.kind == "evaluate":
            reply.statistics["counts"] = {"local": [2, 1], "base": [0, 0], "novel": [0, 0]}
        return reply

    coordinator = run("zero-shot", {"liar": liar})
    coordinator.run()
    assert "counts of right answers" in results(tmp_path)["clients_not_evaluated"]["liar"]


def test_too_few_replies_for_the_rule_end_the_run(run, tmp_path):
    bad = {name: spoiled(CATALOGUE[name][0]) for name in ("nan", "shape")}
    coordinator = run("promptfl", bad, aggregation="krum", max_change_ratio=None)
    with pytest.raises(
        Exception, match=r"3 acceptable replies.*aggregation krum needs 5; nan: .* not finite"
    ):
        coordinator.run()


def train_reply(value: float) -> Reply:
    return Reply("train", 1, "a", shared={"w": np.float32([value, 0.0])})


def judged(changes: dict[str, float], ratio: float | None) -> dict[str, str]:
    request = Request("train", "fed", 1, {}, shared={"w": np.zeros(2, np.float32)})
    replies = {client: train_reply(value) for client, value in changes.items()}
    limits = ServerConfig(max_change_ratio=ratio)
    return outliers(replies, dict.fromkeys(changes, request), limits)


def test_an_outlier_is_judged_by_the_median_of_the_round():
    changes = {"a": 1.0, "b": -2.0, "c": 3.0, "d": 7.0, "e": 2.0}
    # The median of 1 2 2 3 7 is 2.
    found = judged(changes, 3.0)
    assert list(found) == ["d"]
    assert "by 7 (L2 norm), the median of the round is 2, allowed are 6" in found["d"]
    assert judged(changes, 3.5) == {}
    assert judged(changes, None) == {}
    assert judged(dict(reversed(changes.items())), 3.0) == found


def test_two_clients_or_a_round_in_which_most_stood_still_have_no_outlier():
    assert judged({"a": 1.0, "b": 1000.0}, 1.0) == {}
    assert judged({"a": 0.0, "b": 0.0, "c": 1000.0}, 2.0) == {}
