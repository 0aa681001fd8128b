"""CLIP-Adapter by hand, against open_clip's own features, and in its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from open_clip.model import CLIP
from support import close, read_fixture

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.data.transforms import Preprocess
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.methods.clip_adapter import ClipAdapterConfig
from blend_core.methods.zero_shot import ZeroShotConfig

NAMES = ["red fox", "polka_dotted cup", "bus"]


def build(tower, **settings):
    return build_method(ClipAdapterConfig(name="clip-adapter", **settings), tower, 3)


@pytest.fixture
def tower_a(backbone):
    return backbone("tower_a")


@pytest.fixture
def images():
    return torch.from_numpy(read_fixture("mma_a")[1]["in/images"])


def open_clip_features(tower, images, classes):
    """Raw features of open_clip's own forward passes, [B, d_e] and [C, d_e]."""
    padding = tower.context_length - classes.tokens.shape[1]
    tokens = F.pad(classes.tokens, (0, padding))
    return tower.model.encode_image(images), tower.model.encode_text(tokens)


@pytest.mark.parametrize("text", [False, True])
def test_logits_equal_the_formula_over_open_clips_features(tower_a, images, text):
    method = build(tower_a, ratio=0.3, text=text)
    classes = method.tokenize(NAMES, "a photo of a {}.")

    def adapted(f, name):
        down, up = (
            torch.from_numpy(snapshot(method.shared())[f"{name}.{layer}.weight"])
            for layer in ("down", "up")
        )
        f = 0.3 * torch.clamp(torch.clamp(f @ down.T, min=0) @ up.T, min=0) + 0.7 * f
        return f / f.norm(dim=-1, keepdim=True)

    image, prompt = open_clip_features(tower_a, images, classes)
    prompt = adapted(prompt, "text") if text else F.normalize(prompt, dim=-1)
    expected = tower_a.temperature * adapted(image, "vision") @ prompt.T
    torch.testing.assert_close(method.logits(images, classes), expected, atol=5e-5, rtol=0)


def test_a_feature_by_hand(tower_a):
    method = build(tower_a, reduction=16, ratio=0.5)  # 32 -> 2 -> 32
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.zero_()
        method.vision.down.weight[0, 0] = 2.0
        method.vision.down.weight[1, 0] = -2.0  # dead for a positive input
        method.vision.up.weight[1, 0] = 4.0
        method.vision.up.weight[2, 0] = -4.0  # dead: the second ReLU
        method.vision.up.weight[3, 1] = 9.0
    feature = torch.zeros(1, 32)
    feature[0, 0] = 3.0
    # 0.5 * [0, 4 * 2 * 3, 0, ...] + 0.5 * [3, 0, ...] = [1.5, 12, 0, ...]
    expected = np.zeros((1, 32), np.float32)
    expected[0, :2] = np.array([1.5, 12.0]) / np.sqrt(1.5**2 + 12.0**2)
    close(method.residual(feature, method.vision), expected, 1e-6)


@pytest.mark.parametrize("text", [False, True])
def test_a_silent_adapter_reproduces_zero_shot(tower_a, images, text):
    method = build(tower_a, text=text)
    with torch.no_grad():
        for name, parameter in method.shared().items():
            if name.endswith("up.weight"):
                parameter.zero_()
    classes = method.tokenize(NAMES, "a photo of a {}.")
    zero_shot = build_method(ZeroShotConfig(name="zero-shot"), tower_a, 0)
    expected = zero_shot.logits(images, classes)
    torch.testing.assert_close(method.logits(images, classes), expected, atol=1e-5, rtol=0)


def test_every_weight_has_a_gradient_and_clip_has_none(tower_a, images):
    method = build(tower_a, text=True)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    method.loss(images, torch.tensor([0, 1, 2, 0]), classes)["loss"].backward()
    for name, parameter in method.shared().items():
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in tower_a.model.parameters())


def test_names_initial_values_and_aggregation(tower_a):
    state = torch.random.get_rng_state()
    method, other = build(tower_a), build(tower_a, aggregate="none", text=True)
    assert torch.equal(state, torch.random.get_rng_state())
    assert list(method.shared()) == ["vision.down.weight", "vision.up.weight"]
    assert method.private() == {}
    assert other.shared() == {}
    assert list(other.private()) == [
        "text.down.weight",
        "text.up.weight",
        "vision.down.weight",
        "vision.up.weight",
    ]
    # Another layer, another draw; the same layer, the same draw.
    values = snapshot(other.private())
    assert np.array_equal(values["vision.up.weight"], snapshot(method.shared())["vision.up.weight"])
    assert not np.array_equal(values["text.up.weight"], values["vision.up.weight"])
    for name, bound in [("vision.down.weight", 32**-0.5), ("vision.up.weight", 8**-0.5)]:
        assert 0.9 * bound < np.abs(values[name]).max() <= bound, name


@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("ViT-B-16-quickgelu", {"text": True}, 262_144),
        ("RN50-quickgelu", {}, 2 * 1024 * 256),
    ],
)
def test_counts_with_a_text_adapter_and_at_a_resnet(name, settings, count):
    described = Backbone.describe(BackboneConfig(name=name, weights="openai"))
    counts = build(described, **settings).parameter_counts()
    assert counts == {"shared": count, "private": 0, "trainable": count}


def test_a_resnet_tower_will_do():
    torch_state = torch.random.get_rng_state()
    vision = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
    model = CLIP(16, vision, text).eval().requires_grad_(False)
    torch.random.set_rng_state(torch_state)
    preprocess = Preprocess(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic")
    method = build(Backbone("small ResNet", model, preprocess))
    classes = method.tokenize(NAMES, "a photo of a {}.")
    losses = method.loss(torch.ones(2, 3, 32, 32), torch.tensor([0, 1]), classes)
    losses["loss"].backward()
    assert torch.isfinite(losses["loss"])
    assert all(parameter.grad is not None for parameter in method.parameters())


def test_a_reduction_beyond_the_joint_space_is_refused(tower_a):
    with pytest.raises(ConfigError, match=r"method\.reduction = 33: .* 32 dimensions; .* 1 to 32"):
        build(tower_a, reduction=33)
    assert build(tower_a, reduction=32).vision.down.weight.shape == (1, 32)
