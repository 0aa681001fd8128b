"""AdaptFormer by hand, against open_clip's own blocks, and in its limits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support import close, read_fixture

from blend_core.adapters import Bottleneck, dropout
from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.adaptformer import AdaptFormerConfig, MlpAdapter
from blend_core.methods.base import snapshot
from blend_core.methods.zero_shot import ZeroShotConfig
from blend_core.randomness import torch_generator

NAMES = ["red fox", "polka_dotted cup", "bus", "snow_leopard", "F-16A"]


def build(tower, trained=True, **settings):
    """A method with small adapters; trained: all its tensors random, as after training."""
    config = AdaptFormerConfig(name="adaptformer", **{"rank": 4, "towers": "both", **settings})
    method = build_method(config, tower, 3)
    if trained:
        draws = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for _, parameter in sorted(method.named_parameters()):
                parameter.normal_(0.0, 0.5, generator=draws)
    return method


@pytest.fixture
def tower_a(backbone):
    return backbone("tower_a")


@pytest.fixture
def images():
    return torch.from_numpy(read_fixture("mma_a")[1]["in/images"])


def hooked(block, down, up, scale):
    """Make open_clip's block add scale * up(relu(down(h))) to the output of its MLP."""
    after_attention = []
    block.ln_2.register_forward_pre_hook(lambda _, args: after_attention.append(args[0]))

    def add(module, args, out):
        h = after_attention.pop()
        hidden = torch.clamp(h @ down.weight.T + down.bias, min=0)
        return out + scale * (hidden @ up.weight.T + up.bias)

    block.mlp.register_forward_hook(add)


@pytest.mark.parametrize("towers", ["vision", "both"])
def test_logits_equal_the_formula_in_open_clips_blocks(tower_a, images, towers):
    method = build(tower_a, towers=towers, scale=0.2)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    model = copy.deepcopy(tower_a.model)
    for number, block in enumerate(model.visual.transformer.resblocks, 1):
        adapter = method.vision[str(number)]
        hooked(block, adapter.down, adapter.up, 0.2)
    if towers == "both":
        for number, block in enumerate(model.transformer.resblocks, 1):
            adapter = method.text[str(number)]
            hooked(block, adapter.down, adapter.up, 0.2)
    padding = tower_a.context_length - classes.tokens.shape[1]
    image = F.normalize(model.encode_image(images), dim=-1)
    text = F.normalize(model.encode_text(F.pad(classes.tokens, (0, padding))), dim=-1)
    torch.testing.assert_close(method.text_features(classes), text, atol=1e-5, rtol=0)
    expected = tower_a.temperature * image @ text.T
    torch.testing.assert_close(method.logits(images, classes), expected, atol=5e-5, rtol=0)


def test_a_branch_by_hand():
    bottleneck = Bottleneck(0, "x", 2, 1)
    with torch.no_grad():
        bottleneck.down.weight.copy_(torch.tensor([[1.0, -1.0]]))
        bottleneck.down.bias.fill_(0.5)
        bottleneck.up.weight.copy_(torch.tensor([[2.0], [4.0]]))
        bottleneck.up.bias.copy_(torch.tensor([0.0, 1.0]))
    adapter = MlpAdapter(bottleneck, 0.1, 0.0, None)
    # down: 3 - 1 + 0.5 = 2.5 and 1 - 3 + 0.5 = -1.5 -> 0
    added = adapter.to_mlp(torch.tensor([[[3.0, 1.0], [1.0, 3.0]]]))
    close(added, np.array([[[0.5, 1.1], [0.0, 0.1]]], np.float32), 1e-6)
    assert adapter.to_attention(added, added) is None
    assert adapter.to_output(added, added) is None


def test_training_starts_from_zero_shot(tower_a, images):
    method = build(tower_a, trained=False)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    zero_shot = build_method(ZeroShotConfig(name="zero-shot"), tower_a, 0)
    assert torch.equal(method.logits(images, classes), zero_shot.logits(images, classes))
    method.loss(images, torch.tensor([0, 3, 4, 1]), classes)["loss"].backward()
    for name, parameter in method.shared().items():
        moves = ".up." in name  # down has no gradient until up has left zero
        assert (parameter.grad.abs().sum() > 0) == moves, name


def test_initial_values_are_those_of_the_public_code(tower_a):
    state = torch.random.get_rng_state()
    values, again = (snapshot(build(tower_a, trained=False).shared()) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in values.items():
        assert np.array_equal(value, again[name])
        if name.endswith("down.weight"):
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < np.abs(value).max() <= bound, name
        else:
            assert not value.any(), name
    assert not np.array_equal(values["vision.1.down.weight"], values["vision.2.down.weight"])


def test_dropout_draws_from_the_update_alone_and_not_in_evaluation(tower_a, images):
    plain, method = build(tower_a), build(tower_a, dropout=0.5)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    expected = plain.logits(images, classes)
    assert torch.equal(method.logits(images, classes), expected)
    found = []
    for seed in (1, 1, 2):
        method.draws = torch_generator(seed, "method")
        found.append(method.logits(images, classes))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], expected)
    method.draws = None
    assert torch.equal(method.logits(images, classes), expected)


def test_dropout_keeps_the_mean():
    x = torch.ones(100_000)
    dropped = dropout(x, 0.25, torch_generator(0, "x"))
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs(dropped.mean().item() - 1) < 0.01
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, torch_generator(0, "x")) is x


def test_counts_of_both_towers_at_vit_b_16():
    described = Backbone.describe(BackboneConfig(name="ViT-B-16-quickgelu", weights="openai"))
    method = build(described, trained=False, rank=64, towers="both")
    counts = {"shared": 1_982_976, "private": 0, "trainable": 1_982_976}
    assert method.parameter_counts() == counts


@pytest.mark.parametrize("towers", ["vision", "both"])
def test_without_aggregation_the_same_tensors_stay_at_the_site(tower_a, towers):
    own = build(tower_a, trained=False, towers=towers, aggregate="none")
    assert own.shared() == {}
    assert list(own.private()) == list(build(tower_a, trained=False, towers=towers).shared())


def test_what_the_towers_cannot_carry_is_refused(tower_a):
    with pytest.raises(ConfigError, match=r"method\.rank = 65: the text tower is 64 wide"):
        build(tower_a, rank=65)
    with pytest.raises(ConfigError, match=r"method\.rank = 129: the vision tower .* 1 to 128"):
        build(tower_a, rank=129, towers="vision")
    assert len(build(tower_a, rank=65, towers="vision").shared()) == 12
