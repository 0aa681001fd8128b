"""Local differential privacy: what leaves the site is what Flower's own mod would send."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blend_core.backbone import Backbone
from blend_core.config import parse_experiment
from blend_core.messages import Reply, Request, flatten
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.noise import global_numpy
from client.node import Node
from client.privacy import _clipped_with_noise, outgoing
from client.site import Site

SENT = {"a": np.float32([[10.0, 10.0]]), "b": np.float32([20.0])}
TRAINED = {"a": np.float32([[13.0, 10.0]]), "b": np.float32([24.0])}


def setting(**privacy):
    return parse_experiment({"clients": 3, "privacy": {"kind": "local", **privacy}})


def flat(upload) -> np.ndarray:
    return np.concatenate([upload["a"].reshape(-1), upload["b"]])


def test_without_local_noise_the_trained_tensors_leave_as_they_are(tmp_path):
    for kind in ("none", "central"):
        experiment = parse_experiment({"clients": 3, "privacy": {"kind": kind}})
        assert outgoing(TRAINED, SENT, experiment, tmp_path, "site") is TRAINED
    assert not list(tmp_path.iterdir())


def test_a_change_is_clipped(tmp_path):
    experiment = setting(clipping_norm=1.0, noise_multiplier=1e-6)
    # The change (3, 0, 4) has norm 5.
    upload = outgoing(TRAINED, SENT, experiment, tmp_path, "site")
    np.testing.assert_allclose(flat(upload), [10.6, 10.0, 20.8], atol=1e-4)
    assert {n: (v.shape, v.dtype) for n, v in upload.items()} == {
        n: (v.shape, v.dtype) for n, v in SENT.items()
    }


def test_the_noise_covers_any_two_uploads(tmp_path):
    big = {"a": np.zeros(40_000, np.float32)}
    upload = outgoing(big, big, setting(clipping_norm=0.5, noise_multiplier=3.0), tmp_path, "s")
    # 2 C z = 3; the deviation of 40,000 draws is off by 0.35 %.
    assert upload["a"].std() == pytest.approx(3.0, rel=0.02)


def test_it_is_the_arithmetic_of_flowers_mod():
    from flwr.app import Array, ArrayRecord, Context, Message, Metadata, RecordDict
    from flwr.clientapp.mod import LocalDpMod

    def message(vector: np.ndarray) -> Message:
        content = RecordDict({"arrays": ArrayRecord({"shared": Array(vector)})})
        return Message(content=content, metadata=Metadata(0, "", 0, 0, "", "", 0.0, 0.0, "train"))

    change = np.array([3.0, -4.0, 12.0])
    privacy = setting(clipping_norm=2.0, noise_multiplier=1.5).privacy
    # The epsilon from which the mod makes the deviation 2 C z = 6 out of the sensitivity 2 C.
    nominal = math.sqrt(2 * math.log(1.25 / privacy.delta)) / 1.5
    mod = LocalDpMod(2.0, 4.0, nominal, privacy.delta)
    context = Context(0, 0, {}, RecordDict(), {})
    with global_numpy(7):
        reply = mod(message(np.zeros(3)), context, lambda *_: message(change))
    with global_numpy(7):
        ours = _clipped_with_noise(change.copy(), privacy)
    np.testing.assert_allclose(ours, reply.content["arrays"]["shared"].numpy(), rtol=1e-12)


def test_a_round_done_again_sends_the_same_and_another_request_gets_other_noise(tmp_path):
    def noise(trained=SENT, sent=SENT, place="one", client="site", **privacy) -> list[float]:
        folder = tmp_path / place
        upload = outgoing(trained, sent, setting(**privacy), folder, client)
        return list(flat(upload) - flat(sent))

    assert noise() == noise()
    # A server that asks the same round twice must not see noise that cancels out.
    other = {"a": SENT["a"], "b": SENT["b"] + 1}
    assert not np.allclose(noise(other, other), noise(), atol=1e-3)
    assert noise(place="two") != noise()
    assert noise(client="other") != noise()
    seeded = noise(place="three", noise_from="seed")
    assert seeded == noise(place="four", noise_from="seed")
    assert not (tmp_path / "three").exists()
    assert len((tmp_path / "one" / "noise.key").read_text()) == 64


def test_a_site_that_learned_nothing_is_covered_too(tmp_path):
    upload = outgoing(SENT, SENT, setting(), tmp_path, "site")
    assert np.isfinite(flat(upload)).all()
    assert (flat(upload) != flat(SENT)).all()


def test_a_site_keeps_what_it_trained_and_sends_it_with_noise(tiny_experiment, tower, tmp_path):
    def answer(kind: str) -> tuple[Reply, dict]:
        privacy = {"kind": kind}
        backbone = tower("tower_a").model_dump()
        experiment = tiny_experiment(backbone=backbone, privacy=privacy)
        method = build_method(experiment.method, Backbone.describe(experiment.backbone), 1)
        shared = snapshot(method.shared())
        node = Node(Site("client-00", tmp_path / kind, partition=0), "fed")
        reply = node.handle(Request("train", "fed", 1, experiment.to_json(), shared=shared))
        assert reply.error is None
        return reply, shared

    (plain, _), (noisy, sent) = answer("none"), answer("local")
    assert noisy.statistics["private_sha256"] == plain.statistics["private_sha256"]
    change = flatten(noisy.shared) - flatten(sent)
    # 2 C z = 2, and a change of norm 1 at most over thousands of values.
    assert change.std() == pytest.approx(2.0, rel=0.05)
