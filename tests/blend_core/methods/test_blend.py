"""BLEND equals the released research code and its own limit cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import assert_server_mean, close, read_fixture

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.base import restore, snapshot
from blend_core.methods.blend import BlendConfig
from blend_core.methods.zero_shot import ZeroShotConfig
from blend_core.settings import load_experiment

FIXTURES = ["blend_a", "blend_b"]


def fixture_method(backbone, name, **changes):
    meta, arrays = read_fixture(name)
    settings = {
        "vision_rank": meta["bottleneck"],
        "text_rank": meta["bottleneck"],
        "projection_rank": meta["proj_bottleneck"],
        "gamma": meta["gamma"],
        "lambda": meta["lambda"],
        "scale": meta["scale"],
        **changes,
    }
    method = build_method(BlendConfig(name="blend", **settings), backbone(meta["tower"]), 0)
    parameters = {k[6:]: v for k, v in arrays.items() if k.startswith("param/")}
    restore({**method.shared(), **method.private()}, parameters)
    images = torch.from_numpy(arrays["in/images"])
    classes = method.backbone.tokenize(meta["class_names"], meta["template"])
    return method, meta, arrays, images, classes


def gradients(method, images, meta, classes):
    loss = method.loss(images, torch.tensor(meta["labels"]), classes)
    loss["loss"].backward()
    named = {**method.shared(), **method.private()}
    return loss, {name: parameter.grad for name, parameter in named.items()}


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_and_losses_match_the_fixture(backbone, name):
    method, meta, arrays, images, classes = fixture_method(backbone, name)
    text = method.text_features(classes)
    anchor, fused = method.anchor_and_fused(images, text)
    new = method.backbone.tokenize(meta["new_class_names"], meta["template"])
    new_anchor, new_fused = method.anchor_and_fused(images, method.text_features(new))
    general, personal = method.heads(images)
    for got, expected, tolerance in [
        (text, "out/text_features", 1e-5),
        (general, "out/g_head_raw", 5e-5),
        (personal, "out/p_head_raw", 5e-5),
        (anchor, "out/logits_anchor", 5e-5),
        (fused, "out/logits_fused", 5e-5),
        (method.logits(images, classes), "eval/logits_fused", 5e-5),
        (new_anchor, "new/logits_anchor", 5e-5),
        (new_fused, "new/logits_fused", 5e-5),
    ]:
        np.testing.assert_allclose(got.detach(), arrays[expected], atol=tolerance, rtol=0)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    for part in ("loss", "loss_anchor", "loss_fused"):
        assert abs(losses[part].item() - float(arrays[f"out/{part}"])) < 1e-5


@pytest.mark.parametrize("name", FIXTURES)
def test_gradients_match_the_fixture(backbone, name):
    method, meta, arrays, images, classes = fixture_method(backbone, name)
    _, found = gradients(method, images, meta, classes)
    expected = {k[5:]: v for k, v in arrays.items() if k.startswith("grad/")}
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key], value, atol=1e-4 * np.abs(value).max(), rtol=0, err_msg=key
        )


@pytest.mark.parametrize("name", FIXTURES)
def test_gradient_scaling_multiplies_tower_gradients_by_one_over_s_only(backbone, name):
    method, meta, arrays, images, classes = fixture_method(backbone, name, gradient_scaling=False)
    _, found = gradients(method, images, meta, classes)
    for key, gradient in found.items():
        factor = 1.0 if key.startswith("proj") else meta["scale"]
        value = arrays[f"grad/{key}"] * factor
        np.testing.assert_allclose(gradient, value, atol=2e-4 * np.abs(value).max(), rtol=0)


def test_server_averages_the_adapters_of_both_towers(backbone):
    """The fixture holds some of the blocks."""
    method, _, arrays, _, _ = fixture_method(backbone, "blend_a")
    names = [n for n in method.shared() if n.startswith(("text.1.", "vision.1.", "vision.12."))]
    assert {f"server/upload/{n}" for n in names} == {k for k in arrays if "/upload/" in k}
    assert_server_mean(arrays, names)


@pytest.mark.parametrize("gamma", [0.0, 0.09, 0.9, 1.0])
def test_zero_up_projections_reproduce_zero_shot_for_every_gamma(backbone, gamma):
    method, _, _, images, classes = fixture_method(
        backbone, "blend_a", p_head_input="post_ln", gamma=gamma
    )
    with torch.no_grad():
        for name, parameter in {**method.shared(), **method.private()}.items():
            if ".up." in name:
                parameter.zero_()
        anchor, fused = method.anchor_and_fused(images, method.text_features(classes))
        zero_shot = build_method(ZeroShotConfig(name="zero-shot"), method.backbone, 0).logits(
            images, classes
        )
    np.testing.assert_array_equal(anchor, zero_shot)
    np.testing.assert_allclose(fused, anchor, atol=1e-5, rtol=0)


# Limit cases of METHODS 14. A gradient of None, not zero: AdamW would still decay the tensor.


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.8, 1.0])
def test_gamma_zero_is_the_anchor_for_every_lambda(backbone, weight):
    changes = {"gamma": 0.0, "lambda": weight}
    method, meta, arrays, images, classes = fixture_method(backbone, "blend_a", **changes)
    close(method.logits(images, classes), arrays["out/logits_anchor"], 5e-5)
    losses, found = gradients(method, images, meta, classes)
    close(losses["loss"], arrays["out/loss_anchor"], 1e-5)
    assert all(found[name] is None for name in method.private())
    assert all(found[name].abs().sum() > 0 for name in method.shared())


def test_gamma_one_is_the_personal_head_alone(backbone):
    method, _, arrays, images, classes = fixture_method(backbone, "blend_a", gamma=1.0)
    personal = arrays["out/p_head_raw"]
    personal = personal / np.linalg.norm(personal, axis=-1, keepdims=True)
    expected = method.backbone.temperature.item() * personal @ arrays["out/text_features"].T
    close(method.logits(images, classes), expected, 5e-5)


def test_lambda_zero_trains_the_anchor_alone(backbone):
    method, meta, arrays, images, classes = fixture_method(backbone, "blend_a", **{"lambda": 0.0})
    losses, found = gradients(method, images, meta, classes)
    close(losses["loss"], arrays["out/loss_anchor"], 1e-5)
    assert all(found[name] is None for name in method.private())
    assert all(found[name].abs().sum() > 0 for name in method.shared())


def test_lambda_one_has_no_anchor_term(backbone):
    method, meta, arrays, images, classes = fixture_method(backbone, "blend_a", **{"lambda": 1.0})
    losses, found = gradients(method, images, meta, classes)
    close(losses["loss"], arrays["out/loss_fused"], 1e-5)
    assert all(g is not None and g.abs().sum() > 0 for g in found.values())


def test_initial_tensors_have_the_stated_spread_and_depend_on_the_seed_alone(backbone):
    config = BlendConfig(name="blend", vision_rank=16, text_rank=16, projection_rank=32)
    build = lambda seed: build_method(config, backbone("tower_b"), seed)  # noqa: E731
    state = torch.random.get_rng_state()
    first, again, other = build(0), build(0), build(1)
    assert torch.equal(state, torch.random.get_rng_state())
    values, repeated, differ = (
        snapshot({**m.shared(), **m.private()}) for m in (first, again, other)
    )
    assert all(np.array_equal(values[k], repeated[k]) for k in values)
    assert not np.array_equal(values["vision.1.down.weight"], differ["vision.1.down.weight"])
    down = np.stack([values[f"vision.{n}.down.weight"] for n in range(1, 13)])
    up = np.stack([values[f"vision.{n}.up.weight"] for n in range(1, 13)])
    assert abs(down.std() - math.sqrt(2 / 16)) < 0.02
    assert abs(up.std() - math.sqrt(2 / 64)) < 0.01
    assert abs(values["proj.down.weight"].std() - math.sqrt(2 / 64)) < 0.01
    assert not values["proj.up.weight"].any()
    assert not any(v.any() for k, v in values.items() if k.endswith("bias"))


@pytest.mark.parametrize(
    ("aggregate", "upload_bytes"),
    [
        ("blend", 2_029_056),
        ("full", 3_606_016),
        ("none", 0),
        ("vision", 1_217_280),
        ("text", 811_776),
    ],
)
def test_aggregation_ablations_have_the_papers_bytes_at_vit_b_16(aggregate, upload_bytes):
    described = Backbone.describe(BackboneConfig(name="ViT-B-16-quickgelu", weights="openai"))
    method = build_method(BlendConfig(name="blend", aggregate=aggregate), described, 0)
    shared, private = method.shared(), method.private()
    assert 4 * sum(p.numel() for p in shared.values()) == upload_bytes
    assert sum(p.numel() for p in {**shared, **private}.values()) == 901_504
    assert not set(shared) & set(private)
    assert {id(p) for p in [*shared.values(), *private.values()]} == {
        id(p) for p in method.parameters()
    }
    assert list(shared) == sorted(shared)


def test_the_preset_of_the_released_code_has_its_counts():
    experiment = load_experiment("blend-code")
    method = build_method(experiment.method, Backbone.describe(experiment.backbone), 0)
    assert sum(p.numel() for p in method.shared().values()) == 3_950_592
    assert sum(p.numel() for p in method.private().values()) == 197_504


def test_layers_ranks_and_taps_are_choices(backbone):
    method, _, _, images, classes = fixture_method(backbone, "blend_a")
    assert method.logits(images, classes).shape == (4, 5)
    config = BlendConfig(
        name="blend", vision_layers=[12, 3], text_layers=[2], vision_rank=2, projection_rank="none"
    )
    few = build_method(config, method.backbone, 0)
    assert sorted({n.rsplit(".", 2)[0] for n in few.shared()}) == [
        "text.2",
        "vision.12",
        "vision.3",
    ]
    assert few.private() == {}
    none = BlendConfig(name="blend", vision_rank="none", text_rank="none", projection_rank=8)
    assert build_method(none, method.backbone, 0).shared() == {}
    with pytest.raises(ConfigError, match=r"method\.vision_layers = \[13\].*1 to 12"):
        build_method(
            BlendConfig(name="blend", vision_layers=[13], projection_rank=8), method.backbone, 0
        )
    for change in ({"tap": "raw"}, {"fusion_norm": "after_sum"}, {"p_head_input": "post_ln"}):
        other, *_ = fixture_method(backbone, "blend_a", **change)
        difference = (other.logits(images, classes) - method.logits(images, classes)).abs().max()
        assert difference > 0.01, change


def test_two_private_text_towers_give_two_sets_of_text_features(backbone):
    method, _, _, _, classes = fixture_method(backbone, "blend_a", aggregate="vision")
    first = method.text_features(classes)
    other = snapshot(method.private())
    other["text.1.up.weight"] = -other["text.1.up.weight"]
    restore(method.private(), other)
    assert (method.text_features(classes) - first).abs().max() > 1e-3
