"""FedPGP against stored outputs of its public research code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import assert_gradients, assert_server_mean, close, read_fixture

from blend_core.backbone import Backbone
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.base import restore
from blend_core.methods.fedpgp import FedPGPConfig, contrastive


def trained(backbone, **settings):
    meta, arrays = read_fixture("fedpgp")
    fields = {"context_length": "n_ctx", "rank": "rank", "mu": "mu", "kappa": "kappa"}
    chosen = {field: meta[key] for field, key in fields.items()} | settings
    method = build_method(FedPGPConfig(name="fedpgp", **chosen), backbone(meta["tower"]), 0)
    restore(method.shared(), {"sigma": arrays["param/sigma"][0]})
    restore(method.private(), {"U": arrays["param/U"][0], "V": arrays["param/V"][0]})
    return method, meta, arrays, torch.from_numpy(arrays["in/images"])


def test_logits_loss_and_gradients(backbone):
    method, meta, arrays, images = trained(backbone)
    classes = method.tokenize(meta["class_names"], "")
    close(method.text_features(classes), arrays["out/text_features"], 1e-5)
    close(method.global_features(classes), arrays["out/text_features_global"], 1e-5)
    close(method.anchor_features(classes), arrays["out/text_features_anchor"], 1e-5)
    logits = method.logits(images, classes)
    assert logits.shape == (4, 5)  # acceptance check 10: C logits for C classes
    close(logits, arrays["out/logits"], 5e-5)
    close(logits, arrays["eval/logits"], 5e-5)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    for name in ("loss", "loss_ce", "loss_contrastive"):
        close(losses[name], arrays[f"out/{name}"], 1e-5)
    losses["loss"].backward()
    found = {"sigma": method.sigma.grad, "U": method.U.grad, "V": method.V.grad}
    assert_gradients(found, arrays, "grad/")
    new = method.tokenize(meta["new_class_names"], "")
    close(method.logits(images, new), arrays["new/logits"], 5e-5)


def test_server_averages_sigma_alone(backbone):
    method, _, arrays, _ = trained(backbone)
    names = list(method.shared())
    assert {f"server/upload/{n}" for n in names} == {k for k in arrays if "/upload/" in k}
    assert_server_mean(arrays, names)


def test_the_contrastive_term_by_hand():
    """Acceptance check 10: log 2 when s+ = s-; log(1 + e^2) at s+ = 0, s- = 1, kappa 0.5."""
    first, second = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert contrastive(first, first, first, 0.5).item() == pytest.approx(math.log(2))
    assert contrastive(second, first, first, 0.5).item() == pytest.approx(
        math.log(1 + math.exp(2)), rel=1e-6
    )
    both = contrastive(
        torch.cat([first, second]), torch.cat([first] * 2), torch.cat([first] * 2), 1
    )
    assert both.item() == pytest.approx((math.log(2) + math.log(1 + math.e)) / 2, rel=1e-6)


def test_mu_zero_is_cross_entropy_alone(backbone):
    method, meta, arrays, images = trained(backbone, mu=0.0)
    losses = method.loss(
        images, torch.tensor(meta["labels"]), method.tokenize(meta["class_names"], "")
    )
    assert list(losses) == ["loss"]
    close(losses["loss"], arrays["out/loss_ce"], 1e-5)


def test_mu_weighs_the_contrastive_term(backbone):
    method, meta, arrays, images = trained(backbone, mu=0.5)
    losses = method.loss(
        images, torch.tensor(meta["labels"]), method.tokenize(meta["class_names"], "")
    )
    close(losses["loss"], arrays["out/loss_ce"] + 0.5 * arrays["out/loss_contrastive"], 1e-5)


def test_the_anchor_never_belongs_to_another_class_list(backbone):
    """It is computed once for a class list, by itself again for another, without a gradient."""
    method, meta, arrays, _ = trained(backbone)
    classes = method.tokenize(meta["class_names"], "")
    first = method.anchor_features(classes)
    assert method.anchor_features(classes) is first
    assert not first.requires_grad
    mixed = method.tokenize(meta["class_names"][::-1], "")
    close(method.anchor_features(mixed), arrays["out/text_features_anchor"][::-1].copy(), 1e-5)
    close(method.anchor_features(classes), arrays["out/text_features_anchor"], 1e-5)


def test_the_hand_written_anchor_is_the_hard_prompt(backbone):
    method, meta, _, _ = trained(backbone, anchor="hand_written")
    classes = method.tokenize(meta["class_names"], "")
    _, zero_shot = read_fixture("zeroshot")
    close(method.anchor_features(classes), zero_shot["out/text_features"], 1e-5)
    with pytest.raises(ConfigError, match="class name too long"):
        method.tokenize(["fox " * 71], "")


def test_a_bf16_tower_leaves_the_personal_change_in_float32(tower):
    low = Backbone.load(tower("tower_a"), precision="bf16")
    method = build_method(FedPGPConfig(name="fedpgp", context_length=4), low, 0)
    with torch.no_grad():
        method.U.fill_(1.0)
        method.V.fill_(1.001)
    with low.autocast():
        # 1.001 has no bf16: a product in bf16 would be 4.
        close(method.context() - method.sigma, np.full((4, 64), 4.004, np.float32), 1e-5)


def test_what_cannot_work_is_one_line(backbone):
    tower = backbone("tower_a")
    cases = {
        r"method\.prompts = 2: must be 1; .*wrong class": {"prompts": 2},
        r"method\.rank = 65: the text tower is 64 wide; choose 1 to 64": {"rank": 65},
        r"method\.context_length = 74: .* at most 73": {"context_length": 74},
    }
    for text, settings in cases.items():
        with pytest.raises(ConfigError, match=text):
            build_method(FedPGPConfig(name="fedpgp", **settings), tower, 0)
