"""Messages keep names, order and bits; their bytes follow the closed formula."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.messages import Reply, Request, flatten, tensor_bytes
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.methods.blend import BlendConfig


def test_a_message_comes_back_as_it_was():
    shared = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.float32([[-0.0, np.nan]]),
        "c": np.zeros((0, 4), dtype=np.float32),
    }
    request = Request("train", "fed", 4, {"seed": 0}, True, 3, shared)
    back = Request.unpack(*request.pack())
    assert (back.kind, back.federation, back.round, back.experiment) == (
        "train",
        "fed",
        4,
        {"seed": 0},
    )
    assert (back.evaluate, back.last_round) == (True, 3)
    for name, value in shared.items():
        assert back.shared[name].tobytes() == value.tobytes()
        assert back.shared[name].shape == value.shape


def test_the_vector_is_in_name_order():
    vector = flatten({"b": np.float32([2, 3]), "a": np.float32([1])})
    assert vector.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("model", "weights", "ranks", "expected"),
    [
        # METHODS 15: 12 (A(768, 16) + A(512, 16)) values of 4 bytes.
        ("ViT-B-16-quickgelu", "openai", (16, 16), 2_029_056),
        # 6 A(128, 4) + 4 A(128, 4) values: 10 (2*128*4 + 4 + 128).
        ("blend-tiny", "builtin", (4, 4), 4 * 10 * 1156),
    ],
)
def test_bytes_of_a_message_are_four_per_shared_value_plus_one_header(
    model, weights, ranks, expected
):
    described = Backbone.describe(BackboneConfig(name=model, weights=weights))
    config = BlendConfig(name="blend", vision_rank=ranks[0], text_rank=ranks[1], projection_rank=8)
    shared = snapshot(build_method(config, described, 0).shared())
    assert tensor_bytes(shared) == expected + 128
    # What Flower really ships for the vector.
    vector = Reply("train", 1, "a", shared=shared).pack()[1]
    assert len(Array(vector).data) == expected + 128


def test_no_shared_tensors_cost_no_bytes():
    assert tensor_bytes({}) == 0


def test_a_payload_for_one_client_travels_apart_from_the_shared_tensors():
    shared = {"ctx": np.ones((2, 3), np.float32)}
    payload = {"experts": np.full((2, 2, 3), 7, np.float32)}
    request = Request("train", "fed", 2, {}, shared=shared, payload=payload)
    header, vector = request.pack()
    assert tensor_bytes(request.tensors) == 4 * (6 + 12) + 128
    assert len(Array(vector).data) == 4 * (6 + 12) + 128
    back = Request.unpack(header, vector)
    assert set(back.shared) == {"ctx"}
    assert set(back.payload) == {"experts"}
    assert (back.payload["experts"] == 7).all()
    assert (back.shared["ctx"] == 1).all()
