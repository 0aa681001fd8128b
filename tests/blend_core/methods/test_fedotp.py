"""FedOTP against stored outputs of its public research code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import assert_gradients, assert_server_mean, close, read_fixture

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.errors import ConfigError, RunError
from blend_core.methods import build_method
from blend_core.methods.base import restore
from blend_core.methods.fedotp import FedOTPConfig

VARIANTS = ["cot_a", "cot_b", "cot_c", "cot_d", "sinkhorn"]


def trained(backbone, variant="cot_a"):
    meta, arrays = read_fixture("fedotp")
    stored = meta["variants"][variant]
    config = FedOTPConfig(
        name="fedotp",
        context_length=meta["n_ctx"],
        epsilon=stored["eps"],
        mass=1.0 if stored["gamma"] is None else stored["gamma"],
        solver=stored["solver"].lower(),
        threshold=stored["threshold"],
        max_iterations=stored["max_iter"],
    )
    method = build_method(config, backbone(meta["tower"]), 0)
    restore(method.shared(), {"ctx_global": arrays["param/ctx"][0]})
    restore(method.private(), {"ctx_local": arrays["param/ctx"][1]})
    return method, meta, arrays, torch.from_numpy(arrays["in/images"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_plan_logits_loss_and_gradients(backbone, variant):
    method, meta, arrays, images = trained(backbone, variant)
    classes = method.tokenize(meta["class_names"], "")
    text = method.text_features(classes)
    close(text, arrays["out/text_features"], 1e-5)
    close(method.patch_features(images), arrays["out/patch_features"], 1e-5)
    logits, plan, iterations = method.match(images, text)
    close(plan, arrays[f"out/{variant}/plan"], 2e-6)
    close(logits, arrays[f"out/{variant}/logits"], 5e-5)
    assert meta["variants"][variant]["iterations_used"] in (None, iterations)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    close(losses["loss"], arrays[f"out/{variant}/loss"], 1e-5)
    losses["loss"].backward()
    gradient = torch.stack([method.ctx_global.grad, method.ctx_local.grad])
    assert_gradients({"ctx": gradient}, arrays, f"grad/{variant}/")


@pytest.mark.parametrize("variant", ["cot_a", "cot_d"])
def test_all_images_of_a_batch_stop_together(backbone, variant):
    """An image alone may score otherwise: the stop test is one for the whole batch."""
    method, meta, arrays, images = trained(backbone, variant)
    classes = method.tokenize(meta["class_names"], "")
    alone = torch.cat([method.logits(image[None], classes) for image in images])
    close(alone, arrays[f"out/{variant}/logits_batch_of_one"], 5e-5)
    if variant == "cot_d":
        assert (alone - torch.from_numpy(arrays["out/cot_d/logits"])).abs().max() > 1


def test_new_classes(backbone):
    method, meta, arrays, images = trained(backbone)
    new = method.tokenize(meta["new_class_names"], "")
    close(method.logits(images, new), arrays["new/logits"], 5e-5)


def test_the_iterations_reach_the_training_statistics(backbone):
    method, meta, _, images = trained(backbone)
    losses = method.loss(
        images, torch.tensor(meta["labels"]), method.tokenize(meta["class_names"], "")
    )
    assert losses["transport_iterations"].item() == 54
    assert not losses["transport_iterations"].requires_grad


def test_server_averages_the_global_context_alone(backbone):
    method, _, arrays, _ = trained(backbone)
    names = list(method.shared())
    assert {f"server/upload/{n}" for n in names} == {k for k in arrays if "/upload/" in k}
    assert_server_mean(arrays, names)


def test_equal_prompts_score_by_the_mean_similarity_of_all_patches(backbone):
    """At mass 1 rows and columns are filled; with equal prompts every cell then has 1 / (2 M)."""
    method, meta, _, images = trained(backbone, "sinkhorn")
    with torch.no_grad():
        method.ctx_local.copy_(method.ctx_global)
    text = method.text_features(method.tokenize(meta["class_names"], ""))
    plan = method.match(images, text)[1]
    close(plan.sum(-1), np.full((4, 5, 16), 1 / 16, np.float32), 1e-5)
    similarity = method.patch_features(images).mean(1) @ text[0].T
    close(
        method.match(images, text)[0],
        (method.backbone.temperature * similarity).detach().numpy(),
        5e-5,
    )


def test_bf16_towers_leave_the_plan_in_float32_with_its_whole_mass(tower):
    meta, arrays = read_fixture("fedotp")
    low = Backbone.load(tower(meta["tower"]), precision="bf16")
    method = build_method(FedOTPConfig(name="fedotp", context_length=4), low, 0)
    images = torch.from_numpy(arrays["in/images"])
    classes = method.tokenize(meta["class_names"], "")
    with low.autocast():
        _, plan, _ = method.match(images, method.text_features(classes))
    assert plan.dtype == torch.float32
    close(plan.sum((-2, -1)), np.full((4, 5), 0.8, np.float32), 1e-6)


def test_what_cannot_work_is_one_line(backbone):
    tower = backbone("tower_a")
    with pytest.raises(ConfigError, match=r"method\.context_length = 74: .* at most 73"):
        build_method(FedOTPConfig(name="fedotp", context_length=74), tower, 0)
    resnet = Backbone.describe(BackboneConfig(name="RN50", weights="openai"))
    with pytest.raises(ConfigError, match=r"backbone\.name = 'RN50': .* no patch tok"):
        build_method(FedOTPConfig(name="fedotp"), resnet, 0)
    method, meta, _, images = trained(backbone)
    with torch.no_grad():
        method.ctx_local.fill_(torch.nan)
    with pytest.raises(RunError, match=r"lower train\.lr"):
        method.logits(images, method.tokenize(meta["class_names"], ""))
