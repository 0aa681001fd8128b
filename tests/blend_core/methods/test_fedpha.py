"""FedPHA against stored outputs of its public research code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import assert_gradients, assert_server_mean, close, read_fixture

from blend_core.backbone import Backbone
from blend_core.errors import ConfigError, RunError
from blend_core.methods import build_method
from blend_core.methods.base import restore
from blend_core.methods.fedpha import FedPHAConfig, left_out, projector, push


def build(backbone, **settings):
    meta, arrays = read_fixture("fedpha")
    chosen = {
        "context_length": meta["n_ctx"],
        "ratio": meta["ratio"],
        "margin": meta["alpha"],
        "lambda_pull": meta["lambda_pull"],
        "lambda_push": meta["lambda_push"],
    } | settings
    method = build_method(FedPHAConfig(name="fedpha", **chosen), backbone(meta["tower"]), 0)
    return method, meta, arrays, torch.from_numpy(arrays["in/images"])


def trained(backbone, **settings):
    method, meta, arrays, images = build(backbone, **settings)
    restore(method.shared(), {"ctx_global": arrays["param/ctx_global"][0]})
    restore(method.private(), {"ctx_local": arrays["param/ctx_local"][0]})
    return method, meta, arrays, images


@pytest.mark.parametrize(
    ("svd_gradient", "prefix"), [(False, "grad_detached_basis/"), (True, "grad/")]
)
def test_features_logits_loss_and_gradients(backbone, svd_gradient, prefix):
    """Released code sends the gradient of pull through the SVD, too; `svd_gradient` emulates it."""
    method, meta, arrays, images = trained(backbone, svd_gradient=svd_gradient)
    classes = method.tokenize(meta["class_names"], "")
    close(projector(method.ctx_global, meta["ratio"]), arrays["out/projector"], 1e-5)
    local, shared = method.text_features(classes), method.global_features(classes)
    close(local, arrays["out/text_features_local"], 1e-5)
    close(shared, arrays["out/text_features_global"], 1e-5)
    close(method.projected_features(classes), arrays["out/text_features_projected"], 1e-5)
    close(method.logits(images, classes), arrays["out/logits_local"], 5e-5)
    close(method.scores(images, shared, classes), arrays["out/logits_global"], 5e-5)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    for name in ("loss", "loss_pull", "loss_push"):
        close(losses[name], arrays[f"out/{name}"], 1e-5)
    losses["loss"].backward()
    found = {"ctx_global": method.ctx_global.grad, "ctx_local": method.ctx_local.grad}
    assert_gradients(found, arrays, prefix)


def test_inference_uses_the_local_prompt_alone(backbone):
    method, meta, arrays, images = trained(backbone)
    with torch.no_grad():
        method.ctx_global.fill_(torch.nan)
    for names, key in (("class_names", "eval"), ("new_class_names", "new")):
        classes = method.tokenize(meta[names], "")
        close(method.logits(images, classes), arrays[f"{key}/logits"], 5e-5)


def test_server_averages_the_global_context_alone(backbone):
    method, _, arrays, _ = trained(backbone)
    names = list(method.shared())
    assert {f"server/upload/{n}" for n in names} == {k for k in arrays if "/upload/" in k}
    assert_server_mean(arrays, names)


def test_directions_left_out_are_truncated_in_double_precision():
    assert [left_out(m, 0.8) for m in (5, 10, 15, 16, 20)] == [0, 1, 2, 3, 3]


def test_rank_of_the_projector():
    """Acceptance check 11: 13 of 16 tokens at ratio 0.8."""
    _, arrays = read_fixture("fedpha")
    g = torch.from_numpy(arrays["param/ctx_global"][0])
    assert torch.linalg.matrix_rank(projector(g, 0.8)) == 13
    assert torch.linalg.matrix_rank(projector(g, 0.8, "complement")) == 64 - 3
    assert torch.linalg.matrix_rank(projector(g, 1.0)) == 16
    close(projector(g, 1.0, "complement"), np.eye(64, dtype=np.float32), 0)
    assert not projector(g, 0.0).any()


def test_projectors_by_hand():
    """g = diag(3, 2) in three dimensions: k = 1 leaves out the first axis."""
    g = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    close(projector(g, 0.5), np.diag([0, 1, 0]).astype(np.float32), 1e-6)
    close(projector(g, 0.5, "complement"), np.diag([0, 1, 1]).astype(np.float32), 1e-6)


def test_no_gradient_reaches_the_global_context_through_the_projector(backbone):
    """Acceptance check 11: pull alone sends none; all of it is the stored one for a constant Q."""
    method, meta, arrays, images = trained(backbone, svd_gradient=False)
    losses = method.loss(
        images, torch.tensor(meta["labels"]), method.tokenize(meta["class_names"], "")
    )
    losses["loss_pull"].backward(retain_graph=True)
    assert method.ctx_global.grad is None
    assert method.ctx_local.grad.any()
    losses["loss"].backward()
    assert_gradients({"ctx_global": method.ctx_global.grad}, arrays, "grad_detached_basis/")


def test_svd_gradient_sends_the_gradient_of_pull_into_the_global_context(backbone):
    """It is what the stored gradients of released code have beyond those for a constant Q."""
    method, meta, arrays, images = trained(backbone, svd_gradient=True)
    losses = method.loss(
        images, torch.tensor(meta["labels"]), method.tokenize(meta["class_names"], "")
    )
    losses["loss_pull"].backward()
    whole = arrays["grad/ctx_global"]
    atol = 1e-4 * float(np.abs(whole).max())
    beyond = (whole - arrays["grad_detached_basis/ctx_global"])[0]
    assert np.abs(beyond).max() > 20 * atol
    close(method.ctx_global.grad, beyond, atol)


def test_push_by_hand():
    """Distances 0, 1 and sqrt 2 at margin 1.2: (1.2 + 0.2 + 0) / 3; no gradient is nan."""
    local = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]).requires_grad_()
    shared = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    loss = push(local, shared, 1.2)
    close(loss, np.float32(1.4 / 3), 1e-6)
    loss.backward()
    assert torch.isfinite(local.grad).all()


def test_without_pull_and_push_both_prompts_learn_by_themselves(backbone):
    method, meta, arrays, images = trained(backbone, lambda_pull=0.0, lambda_push=0.0)
    labels = torch.tensor(meta["labels"])
    losses = method.loss(images, labels, method.tokenize(meta["class_names"], ""))
    entropies = [
        torch.nn.functional.cross_entropy(torch.from_numpy(arrays[f"out/logits_{part}"]), labels)
        for part in ("local", "global")
    ]
    assert sorted(losses) == ["loss", "loss_global", "loss_local"]
    close(losses["loss"], sum(entropies).numpy(), 1e-5)


def test_the_complement_with_nothing_left_out_pulls_nowhere(backbone):
    method, meta, _, images = trained(backbone, projection="complement", ratio=1.0)
    losses = method.loss(
        images, torch.tensor(meta["labels"]), method.tokenize(meta["class_names"], "")
    )
    close(losses["loss_pull"], np.float32(0), 1e-12)


def test_a_local_prompt_of_another_length_is_read_at_its_own_end(backbone):
    """Released code takes the end of the longest prompt, so that shorter ones are read behind
    their end; not emulated: as a method of that length alone would read it."""
    long, meta, arrays, images = build(backbone, context_length=16, local_context_length=5)
    short, _, _, _ = build(backbone, context_length=5)
    values = {"ctx_local": arrays["param/ctx_local"][0, :5]}
    restore(long.private(), values)
    restore(short.private(), values)
    logits = [m.logits(images, m.tokenize(meta["class_names"], "")) for m in (long, short)]
    close(logits[0], logits[1].detach().numpy(), 1e-6)
    losses = long.loss(images, torch.tensor(meta["labels"]), long.tokenize(meta["class_names"], ""))
    losses["loss"].backward()
    assert long.ctx_local.grad.shape == (5, 64)


def test_bf16_towers_leave_the_gradient_through_the_svd_in_float32(tower):
    meta, arrays = read_fixture("fedpha")
    low = Backbone.load(tower(meta["tower"]), precision="bf16")
    method = build_method(FedPHAConfig(name="fedpha", svd_gradient=True), low, 0)
    images = torch.from_numpy(arrays["in/images"])
    classes = method.tokenize(meta["class_names"], "")
    with low.autocast():
        losses = method.loss(images, torch.tensor(meta["labels"]), classes)
        losses["loss"].backward()
    assert {value.dtype for value in losses.values()} == {torch.float32}
    assert {p.grad.dtype for p in method.parameters()} == {torch.float32}


def test_what_cannot_work_is_one_line(backbone):
    tower = backbone("tower_a")
    for key in ("context_length", "local_context_length"):
        with pytest.raises(ConfigError, match=rf"method\.{key} = 74: .* at most 73"):
            build_method(FedPHAConfig(name="fedpha", **{key: 74}), tower, 0)
    method = build_method(FedPHAConfig(name="fedpha", local_context_length=73), tower, 0)
    with pytest.raises(ConfigError, match=r"'Boeing 737-800' with a context of 73 vectors"):
        method.tokenize(["Boeing 737-800"], "")
    with pytest.raises(RunError, match=r"global context is not finite; lower train\.lr"):
        projector(torch.full((4, 8), torch.nan), 0.8)
