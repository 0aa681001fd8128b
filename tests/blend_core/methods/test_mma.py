"""MMA and pFedMMA against stored outputs of the public research code, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import assert_gradients, assert_server_mean, close, read_fixture

from blend_core.adapters import CoupledAdapter
from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.base import restore, snapshot
from blend_core.methods.mma import MmaConfig
from blend_core.methods.zero_shot import ZeroShotConfig

FIXTURES = ["mma_a", "mma_b"]
METHODS = ["mma-fedavg", "pfedmma"]


def stored(name):
    """A fixture with our names: it counts middle layers by the block, we from 1."""
    meta, arrays = read_fixture(name)
    first = min(meta["layers"])
    for block in meta["layers"]:
        arrays = {
            k.replace(f"/shared.{block}.", f"/middle.{block - first + 1}."): v
            for k, v in arrays.items()
        }
    return meta, arrays


def tensors(method):
    return {**method.shared(), **method.private()}


def trained(backbone, fixture="mma_a", name="mma-fedavg", **settings):
    meta, arrays = stored(fixture)
    config = MmaConfig(
        name=name,
        **{
            "rank": meta["bottleneck"],
            "last_blocks": len(meta["layers"]),
            "scale": meta["scale"],
            **settings,
        },
    )
    method = build_method(config, backbone(meta["tower"]), 0)
    parameters = {k[6:]: v for k, v in arrays.items() if k.startswith("param/")}
    restore(tensors(method), parameters)
    images = torch.from_numpy(arrays["in/images"])
    classes = method.tokenize(meta["class_names"], meta["template"])
    return method, meta, arrays, images, classes


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fixture", FIXTURES)
def test_logits_loss_and_gradients(backbone, fixture, name):
    method, meta, arrays, images, classes = trained(backbone, fixture, name)
    close(method.text_features(classes), arrays["out/text_features"], 1e-5)
    close(method.logits(images, classes), arrays["out/logits"], 5e-5)
    close(method.logits(images, classes), arrays["eval/logits"], 5e-5)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    close(losses["loss"], arrays["out/loss"], 1e-5)
    losses["loss"].backward()
    found = {key: value.grad for key, value in tensors(method).items()}
    assert set(found) == {k[5:] for k in arrays if k.startswith("grad/")}
    assert_gradients(found, arrays, "grad/")
    new = method.tokenize(meta["new_class_names"], meta["template"])
    close(method.logits(images, new), arrays["new/logits"], 5e-5)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_without_gradient_scaling_gradients_are_s_times_as_large(backbone, fixture):
    method, meta, arrays, images, classes = trained(backbone, fixture, gradient_scaling=False)
    close(method.logits(images, classes), arrays["out/logits"], 5e-5)
    method.loss(images, torch.tensor(meta["labels"]), classes)["loss"].backward()
    true = {k: v * meta["scale"] for k, v in arrays.items() if k.startswith("grad/")}
    assert_gradients({k: v.grad for k, v in tensors(method).items()}, true, "grad/")


def test_gradient_scaling_leaves_the_gradient_of_the_input_alone(backbone):
    found = []
    for scaling in (True, False):
        method, *_ = trained(backbone, gradient_scaling=scaling)
        coupled = CoupledAdapter(method.vision["2"], method.middle["1"])
        x = torch.linspace(-1, 1, 3 * 128).reshape(1, 3, 128).requires_grad_()
        coupled.to_output(x, x).square().sum().backward()
        found.append((x.grad, method.middle["1"].weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[0][1], 10 * found[1][1], rtol=1e-5, atol=1e-7)


def test_server_averages_everything_in_mma_and_the_middle_layers_in_pfedmma(backbone):
    _, arrays = stored("mma_a")
    arrays = {k.replace("/mean_of_all/", "/aggregate/"): v for k, v in arrays.items()}
    mma, *_ = trained(backbone)
    pfedmma, *_ = trained(backbone, name="pfedmma")
    assert set(mma.shared()) == {k[6:] for k in arrays if k.startswith("param/")}
    assert list(pfedmma.shared()) == [
        "middle.1.bias",
        "middle.1.weight",
        "middle.2.bias",
        "middle.2.weight",
    ]
    for method in (mma, pfedmma):
        assert_server_mean(arrays, list(method.shared()))
        assert set(tensors(method)) == set(mma.shared())
        assert list(method.shared()) == sorted(method.shared())
        assert list(method.private()) == sorted(method.private())


@pytest.mark.parametrize("name", METHODS)
def test_zero_up_projections_reproduce_zero_shot_exactly(backbone, name):
    method, _, _, images, classes = trained(backbone, name=name)
    with torch.no_grad():
        for key, parameter in tensors(method).items():
            if ".up." in key:
                parameter.zero_()
        zero_shot = build_method(ZeroShotConfig(name="zero-shot"), method.backbone, 0)
        expected = zero_shot.logits(images, classes)
        assert torch.equal(method.logits(images, classes), expected)


def test_two_sites_with_other_text_adapters_have_other_text_features(backbone):
    """X1: public code keeps the features of the client evaluated first; not emulated."""
    first, _, _, _, classes = trained(backbone, name="pfedmma")
    second, *_ = trained(backbone, name="pfedmma")
    own = snapshot(second.private())
    own["text.3.up.weight"] = -own["text.3.up.weight"]
    restore(second.private(), own)
    one, two = first.text_features(classes), second.text_features(classes)
    assert (one - two).abs().max() > 1e-3
    # The same with one model that serves both, as in a simulation, and after a step.
    restore(first.private(), own)
    assert torch.equal(first.text_features(classes), two)
    with torch.no_grad():
        first.middle["1"].weight.add_(0.5)
    assert (first.text_features(classes) - two).abs().max() > 1e-4


def branch_of_one_value(backbone, activation):
    """A vision branch that reads x[0] and writes 10 * middle(x[0]) to x[1], middle -2x + 5."""
    config = MmaConfig(name="mma-fedavg", rank=1, last_blocks=1, scale=0.1, activation=activation)
    method = build_method(config, backbone("tower_a"), 0)
    adapter, middle = method.vision["3"], method.middle["1"]
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.zero_()
        adapter.down.weight[0, 0] = 1.0
        middle.weight.fill_(-2.0)
        middle.bias.fill_(5.0)
        adapter.up.weight[1, 0] = 10.0
    return CoupledAdapter(adapter, middle, method.after_middle)


@pytest.mark.parametrize(
    ("activation", "written"),
    [
        # 0.1 * 10 * relu(5 - 2 relu(x)) for x = -1, 2, 3.
        ("relu_twice", [5.0, 1.0, 0.0]),
        # 5 - 2 gelu(x), gelu(x) = x (1 + erf(x / sqrt 2)) / 2.
        ("gelu_once", [5.317311, 1.091000, -0.991901]),
    ],
)
def test_one_branch_by_hand(backbone, activation, written):
    x = torch.zeros(3, 1, 128)
    x[:, 0, 0] = torch.tensor([-1.0, 2.0, 3.0])
    expected = np.zeros((3, 1, 128), np.float32)
    expected[:, 0, 1] = written
    close(branch_of_one_value(backbone, activation).to_output(x, x), expected, 2e-6)


def test_tap_and_activation_change_the_logits(backbone):
    method, _, _, images, classes = trained(backbone)
    for change in ({"tap": "raw"}, {"activation": "gelu_once"}):
        other, *_ = trained(backbone, **change)
        difference = other.logits(images, classes) - method.logits(images, classes)
        assert difference.abs().max() > 0.01, change


@pytest.mark.parametrize(
    ("name", "shared", "private"),
    [
        ("mma-fedavg", 2_765_824, 0),
        ("pfedmma", 132_096, 2_633_728),
    ],
)
def test_counts_of_rank_128_at_vit_b_16(name, shared, private):
    described = Backbone.describe(BackboneConfig(name="ViT-B-16-quickgelu", weights="openai"))
    method = build_method(MmaConfig(name=name, rank=128), described, 0)
    counts = method.parameter_counts()
    assert counts == {"shared": shared, "private": private, "trainable": shared + private}


def test_towers_of_other_depths_are_paired_from_the_top():
    described = Backbone.describe(BackboneConfig(name="ViT-L-14-quickgelu", weights="openai"))
    method = build_method(MmaConfig(name="pfedmma", rank=1), described, 0)
    assert list(method.vision) == [str(n) for n in range(17, 25)]
    assert list(method.text) == [str(n) for n in range(5, 13)]
    assert list(method.middle) == [str(n) for n in range(1, 9)]
    blocks = method.blocks(method.vision, 24)
    assert blocks[:16] == [None] * 16
    assert blocks[16].adapter is method.vision["17"]
    assert blocks[16].middle is method.middle["1"]
    assert method.blocks(method.text, 12)[4].middle is method.middle["1"]


def test_initial_tensors_have_the_stated_spread_and_depend_on_the_seed_alone(backbone):
    config = MmaConfig(name="mma-fedavg", rank=32, last_blocks=3)
    state = torch.random.get_rng_state()
    values, again, other = (
        snapshot(build_method(config, backbone("tower_a"), seed).shared()) for seed in (0, 0, 1)
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(np.array_equal(values[k], again[k]) for k in values)
    assert not np.array_equal(values["middle.1.weight"], other["middle.1.weight"])
    assert not any(v.any() for k, v in values.items() if k.endswith("bias"))
    for pattern, outputs in [("vision.3.down", 32), ("middle.2", 32), ("vision.3.up", 128)]:
        spread = values[f"{pattern}.weight"].std()
        assert abs(spread / math.sqrt(2 / outputs) - 1) < 0.1, pattern


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"last_blocks": 8},
            r"method\.last_blocks = 8: the vision tower has 3 blocks, the text tower 3; "
            r"choose 1 to 3",
        ),
        (
            {"rank": 65, "last_blocks": 1},
            r"method\.rank = 65: the text tower is 64 wide; choose 1 to 64",
        ),
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_what_the_towers_cannot_carry_is_refused(backbone, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_method(MmaConfig(name=name, **settings), backbone("tower_a"), 0)
