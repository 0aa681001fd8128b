"""CLIP-LoRA by hand, against open_clip with merged weights, its dropout and its averaging."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support import close, read_fixture

from blend_core.backbone import Classes
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.base import restore, snapshot
from blend_core.methods.clip_lora import ClipLoraConfig, LoraAttention, LowRank
from blend_core.methods.zero_shot import ZeroShotConfig
from blend_core.randomness import torch_generator
from server.aggregation import weighted_mean

NAMES = ["red fox", "polka_dotted cup", "bus", "snow_leopard", "F-16A"]
LABELS = torch.tensor([0, 3, 4, 1])


def build(tower, trained=True, **settings):
    """A method of 3 blocks per tower; trained: all its tensors random, as after training."""
    method = build_method(ClipLoraConfig(name="clip-lora", **settings), tower, 3)
    if trained:
        draws = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for _, parameter in sorted(method.named_parameters()):
                parameter.normal_(0.0, 0.3, generator=draws)
    return method


@pytest.fixture
def tower_a(backbone):
    return backbone("tower_a")


@pytest.fixture
def images():
    return torch.from_numpy(read_fixture("mma_a")[1]["in/images"])


def merged(tower, method, scale):
    """open_clip's model with W + scale B A in the three row blocks of every in_proj matrix."""
    model = copy.deepcopy(tower.model)
    values = snapshot(method.shared())
    for part, blocks in [
        ("vision", model.visual.transformer.resblocks),
        ("text", model.transformer.resblocks),
    ]:
        for number, block in enumerate(blocks, 1):
            changes = [
                values[f"{part}.{number}.{w}.b"] @ values[f"{part}.{number}.{w}.a"] for w in "qkv"
            ]
            block.attn.in_proj_weight.data += scale * torch.from_numpy(np.concatenate(changes))
    return model


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"rank": 4, "alpha": 3.0}, 1.5),
        ({"rank": 4, "alpha": 3.0, "scaling": "rank"}, 0.75),
        ({}, 1 / math.sqrt(2)),
    ],
)
def test_logits_equal_open_clips_with_merged_weights(tower_a, images, settings, scale):
    method = build(tower_a, **settings)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    model = merged(tower_a, method, scale)
    padding = tower_a.context_length - classes.tokens.shape[1]
    image = F.normalize(model.encode_image(images), dim=-1)
    text = F.normalize(model.encode_text(F.pad(classes.tokens, (0, padding))), dim=-1)
    torch.testing.assert_close(method.text_features(classes), text, atol=1e-5, rtol=0)
    expected = tower_a.temperature * image @ text.T
    torch.testing.assert_close(method.logits(images, classes), expected, atol=5e-5, rtol=0)
    zero_shot = build_method(ZeroShotConfig(name="zero-shot"), tower_a, 0)
    assert (zero_shot.logits(images, classes) - expected).abs().max() > 0.1


def test_a_change_by_hand():
    change = LowRank(0, "x", 2, 1)
    with torch.no_grad():
        change.a.copy_(torch.tensor([[1.0, 2.0]]))
        change.b.copy_(torch.tensor([[3.0], [-1.0]]))
    # A x = 1 * 5 + 2 * 1 = 7; B A x = (21, -7)
    close(change(torch.tensor([[5.0, 1.0]])), np.array([[21.0, -7.0]], np.float32), 0)
    changes = torch.nn.ModuleDict({weight: change for weight in "qkv"})
    adapter = LoraAttention(changes, 0.5, 0.9, None)
    query, key, value = adapter.to_attention(torch.ones(1, 3, 2), torch.tensor([[[5.0, 1.0]]]))
    close(query, np.array([[[10.5, -3.5]]], np.float32), 0)
    assert key.shape == value.shape == (1, 3, 2)
    assert adapter.to_mlp(query) is None
    assert adapter.to_output(query, query) is None


def test_training_starts_from_zero_shot(tower_a, images):
    method = build(tower_a, trained=False)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    zero_shot = build_method(ZeroShotConfig(name="zero-shot"), tower_a, 0)
    assert torch.equal(method.logits(images, classes), zero_shot.logits(images, classes))
    method.loss(images, LABELS, classes)["loss"].backward()
    for name, parameter in method.shared().items():
        moves = name.endswith(".b")  # A has no gradient until B has left zero
        assert (parameter.grad.abs().sum() > 0) == moves, name


def test_initial_values_are_those_of_the_public_code(tower_a):
    state = torch.random.get_rng_state()
    values, again = (snapshot(build(tower_a, trained=False, rank=8).shared()) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in values.items():
        assert np.array_equal(value, again[name])
        if name.endswith(".a"):
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < np.abs(value).max() <= bound, name
        else:
            assert not value.any(), name
    assert not np.array_equal(values["vision.1.q.a"], values["vision.1.k.a"])


def test_inputs_of_q_k_and_v_are_dropped_independently():
    width = 64
    changes = torch.nn.ModuleDict({weight: LowRank(0, "same", width, 1) for weight in "qkv"})
    with torch.no_grad():
        for change in changes.values():
            change.a.fill_(1.0)
            change.b.zero_()
            change.b[0, 0] = 1.0
    added = LoraAttention(changes, 1.0, 0.25, torch_generator(0, "x")).to_attention(
        torch.ones(1, 2, width), torch.ones(1, 2, width)
    )
    # The first entry is the number of kept inputs, each 1 / 0.75.
    draws = torch_generator(0, "x")
    for tensor in added:
        kept = (torch.rand(1, 2, width, generator=draws) >= 0.25).sum(-1) / 0.75
        torch.testing.assert_close(tensor[..., 0], kept, atol=1e-4, rtol=0)
    assert not torch.equal(added[0], added[1])
    assert not torch.equal(added[1], added[2])


def gradients(method, images, classes, draws=None):
    method.zero_grad(set_to_none=True)
    method.draws = draws
    method.loss(images, LABELS, classes)["loss"].backward()
    method.draws = None
    return {name: value.grad.clone() for name, value in method.shared().items()}


def test_text_in_chunks_has_the_same_gradients(tower_a, images, monkeypatch):
    method = build(tower_a, dropout=0.0)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    whole = gradients(method, images, classes, torch_generator(0, "x"))
    monkeypatch.setattr(tower_a, "text_chunk", 2)
    chunked = gradients(method, images, classes, torch_generator(0, "x"))
    for name, value in whole.items():
        atol = 1e-5 * value.abs().max().item()
        torch.testing.assert_close(chunked[name], value, atol=atol, rtol=0)


def test_two_identical_updates_with_dropout_and_chunks_are_identical(tower_a, images, monkeypatch):
    monkeypatch.setattr(tower_a, "text_chunk", 2)
    method = build(tower_a, dropout=0.25)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    first, again, other = (
        gradients(method, images, classes, torch_generator(seed, "x")) for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_chunk_computed_again_drops_the_same_inputs(tower_a, monkeypatch):
    """Checkpointed chunks against chunks that were kept, with draws in the same order."""
    method = build(tower_a, dropout=0.25)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    weights = torch.linspace(-1, 1, 5 * 32).reshape(5, 32)

    def kept():
        parts = [slice(0, 2), slice(2, 4), slice(4, 5)]
        return torch.cat(
            [
                method.text_features(Classes(NAMES[p], classes.tokens[p], classes.end[p]))
                for p in parts
            ]
        )

    found, states = [], []
    for features in (kept, lambda: method.text_features(classes)):
        method.zero_grad(set_to_none=True)
        method.draws = torch_generator(0, "x")
        (features() * weights).sum().backward()
        states.append(method.draws.get_state())
        found.append({n: v.grad.clone() for n, v in method.named_parameters() if "text" in n})
        monkeypatch.setattr(tower_a, "text_chunk", 2)
    method.draws = None
    assert torch.equal(states[0], states[1])
    for name, value in found[0].items():
        atol = 1e-5 * value.abs().max().item()
        torch.testing.assert_close(found[1][name], value, atol=atol, rtol=0)


def test_evaluation_drops_nothing(tower_a, images):
    method, plain = build(tower_a, dropout=0.5), build(tower_a, dropout=0.0)
    classes = method.tokenize(NAMES, "a photo of a {}.")
    expected = plain.logits(images, classes)
    assert torch.equal(method.logits(images, classes), expected)
    method.draws = torch_generator(0, "x")
    assert not torch.equal(method.logits(images, classes), expected)
    method.draws = None
    assert torch.equal(method.logits(images, classes), expected)


def site(tower, a, b):
    """A site that changed one weight, W_q of the first vision block: its entry 0, 0 by b a."""
    method = build(tower, trained=False, rank=1)
    change = method.vision["1"]["q"]
    with torch.no_grad():
        change.a.zero_()[0, 0] = a
        change.b.zero_()[0, 0] = b
    return method


def first_entry(method):
    """What the change of W_q adds to the first entry for an input (1, 0, 0, ...)."""
    added = method.vision["1"]["q"](torch.eye(128)[:1])
    assert not added[0, 1:].any()
    return added[0, 0].item()


def averaged(tower, sites, images):
    uploads = {f"c{i}": snapshot(method.shared()) for i, method in enumerate(sites)}
    method = build(tower, trained=False, rank=1)
    restore(method.shared(), weighted_mean(uploads, {f"c{i}": n for i, n in enumerate(images)}))
    return method


def test_two_sites_that_changed_a_weight_alike_may_average_to_no_change(tower_a, images):
    """FedAvg of A and B is not the average of B A: (1, 1) and (-1, -1) make (0, 0)."""
    sites = [site(tower_a, 1.0, 1.0), site(tower_a, -1.0, -1.0)]
    mean = averaged(tower_a, sites, [3, 3])
    assert [first_entry(method) for method in (*sites, mean)] == [1.0, 1.0, 0.0]
    classes = mean.tokenize(NAMES, "a photo of a {}.")
    zero_shot = build_method(ZeroShotConfig(name="zero-shot"), tower_a, 0)
    expected = zero_shot.logits(images, classes)
    assert torch.equal(mean.logits(images, classes), expected)
    assert all((method.logits(images, classes) - expected).abs().max() > 1e-3 for method in sites)


def test_sites_that_moved_a_alone_average_exactly(tower_a):
    mean = averaged(tower_a, [site(tower_a, 5.0, 2.0), site(tower_a, 1.0, 2.0)], [3, 1])
    assert first_entry(mean) == (3 * 10 + 1 * 2) / 4


def test_names_and_aggregation(tower_a):
    names = list(build(tower_a, trained=False).shared())
    assert {n.split(".", 2)[2] for n in names} == {f"{w}.{m}" for w in "qkv" for m in "ab"}
    own = build(tower_a, trained=False, aggregate="none")
    assert own.shared() == {}
    assert list(own.private()) == names


def test_what_the_towers_cannot_carry_is_refused(tower_a):
    with pytest.raises(ConfigError, match=r"method\.rank = 65: the text tower .* choose 1 to 64"):
        build(tower_a, rank=65)
