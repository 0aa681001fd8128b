"""PromptFL against stored outputs of its public research code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import assert_gradients, assert_server_mean, close, read_fixture

from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.base import restore
from blend_core.methods.promptfl import PromptFLConfig


def build(backbone, **settings):
    meta, arrays = read_fixture("promptfl")
    tower = backbone(meta["tower"])
    config = PromptFLConfig(name="promptfl", context_length=meta["n_ctx"], **settings)
    method = build_method(config, tower, 0)
    images = torch.from_numpy(arrays["in/images"])
    return method, meta, arrays, images


def trained(backbone, **settings):
    method, meta, arrays, images = build(backbone, **settings)
    restore(method.shared(), {"ctx": arrays["param/ctx"]})
    return method, meta, arrays, images


def test_logits_loss_and_gradients(backbone):
    method, meta, arrays, images = trained(backbone)
    classes = method.tokenize(meta["class_names"], "")
    close(method.text_features(classes), arrays["out/text_features"], 1e-5)
    close(method.logits(images, classes), arrays["out/logits"], 5e-5)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    close(losses["loss"], arrays["out/loss"], 1e-5)
    losses["loss"].backward()
    assert_gradients({"ctx": method.ctx.grad}, arrays, "grad/")
    new = method.tokenize(meta["new_class_names"], "")
    close(method.logits(images, new), arrays["new/logits"], 5e-5)


def test_server_averages_the_context(backbone):
    method, _, arrays, _ = build(backbone)
    names = list(method.shared())
    assert {f"server/upload/{n}" for n in names} == {k for k in arrays if "/upload/" in k}
    assert_server_mean(arrays, names)


def test_a_context_starts_from_the_tokens_of_a_phrase(backbone):
    meta, arrays = read_fixture("promptfl")
    method, _, _, images = build(backbone, init_phrase=meta["phrase"])
    close(method.context(), arrays["phrase/ctx_init"], 1e-7)
    assert not method.ctx.any()  # what travels is the difference
    classes = method.tokenize(meta["class_names"], "")
    close(method.logits(images, classes), arrays["phrase/logits"], 5e-5)


@pytest.mark.parametrize("phrase", [" ", "_"])
def test_a_phrase_without_words_is_refused(backbone, phrase):
    with pytest.raises(ConfigError, match="has no words"):
        build(backbone, init_phrase=phrase)


def test_the_proximal_term_has_a_gradient(backbone):
    """X12: released code computes it from detached tensors, so it does nothing; not emulated."""
    method, meta, arrays, images = trained(backbone, proximal=0.5)
    classes = method.tokenize(meta["class_names"], "")
    method.begin({}, {})
    with torch.no_grad():
        method.ctx.add_(0.1)
    losses = method.loss(images, torch.tensor(meta["labels"]), classes)
    size = arrays["param/ctx"].size
    close(losses["loss_proximal"], np.float32(0.25 * size * 0.01), 1e-4)
    losses["loss_proximal"].backward()
    close(method.ctx.grad, np.full(arrays["param/ctx"].shape, 0.05, np.float32), 1e-6)


def test_a_context_longer_than_the_tower_is_refused(backbone):
    tower = backbone("tower_a")
    with pytest.raises(ConfigError, match=r"context_length = 74: .* at least 78 .* at most 73"):
        build_method(PromptFLConfig(name="promptfl", context_length=74), tower, 0)
    method = build_method(PromptFLConfig(name="promptfl", context_length=73), tower, 0)
    with pytest.raises(ConfigError, match=r"'Boeing 737-800' with a context of 73 vectors"):
        method.tokenize(["bus", "Boeing 737-800"], "")
