"""pFedPrompt: the cache of a site's own images, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import close, read_fixture

from blend_core.backbone import Backbone
from blend_core.data import ClientData, Labelled
from blend_core.data.transforms import normalise, prepare_test
from blend_core.errors import ConfigError
from blend_core.methods import build_method, pfedprompt
from blend_core.methods.base import restore, snapshot
from blend_core.methods.pfedprompt import PFedPromptConfig

NAMES = ("red fox", "bus", "cup", "bird")
NEW = ("school bus", "tiger cat")
LABELS = [0, 3, 0]


def build(backbone, labels=LABELS, **settings):
    """A method that has seen one photo per label, and the photos as the tower reads them."""
    config = PFedPromptConfig(name="pfedprompt", **{"context_length": 4, **settings})
    method = build_method(config, backbone, 0)
    draws = torch.Generator().manual_seed(5)
    sizes = [(32, 32), (40, 64), (70, 33)]
    photos = [
        torch.randint(0, 256, (3, *sizes[i % 3]), dtype=torch.uint8, generator=draws)
        for i in range(len(labels))
    ]
    none = Labelled.of([], [])
    data = ClientData(NAMES, NEW, Labelled.of(photos, labels), none, none)
    base = method.tokenize(NAMES, "")
    method.observe(data, base)
    pre = backbone.preprocess
    images = [normalise(prepare_test(photo, pre)[None], pre, "cpu") for photo in photos]
    return method, base, torch.cat(images) if images else torch.zeros(0, 3, 32, 32)


def prompt_logits(method, images, classes):
    """METHODS eq. (0), in NumPy, from the raw features."""
    with torch.no_grad():
        z = method.backbone.image_features(images).numpy().astype(np.float64)
        text = method.text_features(classes).numpy().astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return z, method.backbone.temperature.item() * z @ text.T


def test_a_cached_image_adds_alpha_to_its_class_and_nothing_to_others(backbone):
    method, base, images = build(backbone("tower_a"), labels=[2], alpha=1.5)
    _, prompt = prompt_logits(method, images, base)
    added = np.array([[0, 0, 1.5, 0]])
    close(method.logits(images, base), (prompt + added).astype(np.float32), 5e-5)


def test_a_cached_image_counts_by_its_cosine(backbone):
    method, base, images = build(backbone("tower_a"), alpha=2.0, beta=3.0)
    z, prompt = prompt_logits(method, images, base)
    near = np.exp(-3.0 * (1 - z @ z.T))  # [image, key]; keys 0 and 2 are foxes, key 1 a bird
    added = np.zeros((3, 4))
    added[:, 0] = 2.0 * (near[:, 0] + near[:, 2])
    added[:, 3] = 2.0 * near[:, 1]
    close(method.logits(images, base), (prompt + added).astype(np.float32), 5e-5)


def test_without_sharpness_every_image_counts_alike(backbone):
    method, base, images = build(backbone("tower_a"), alpha=0.5, beta=0.0)
    _, prompt = prompt_logits(method, images, base)
    added = np.array([1.0, 0, 0, 0.5])  # two foxes, one bird
    close(method.logits(images, base), (prompt + added).astype(np.float32), 5e-5)


def test_without_weight_it_is_promptfl(backbone):
    meta, arrays = read_fixture("promptfl")
    method, _, _ = build(backbone("tower_a"), context_length=meta["n_ctx"], alpha=0.0)
    restore(method.shared(), {"ctx": arrays["param/ctx"]})
    images = torch.from_numpy(arrays["in/images"])
    classes = method.tokenize(meta["class_names"], "")
    close(method.logits(images, classes), arrays["out/logits"], 5e-5)


def test_new_classes_are_told_apart_by_the_prompt_alone(backbone):
    method, _, images = build(backbone("tower_a"), alpha=100.0)
    new = method.tokenize(NEW, "")
    _, prompt = prompt_logits(method, images, new)
    close(method.logits(images, new), prompt.astype(np.float32), 5e-5)


def test_training_leaves_the_cache_out(backbone):
    """The loss and the gradient are PromptFL's, whatever the cache holds."""
    meta, arrays = read_fixture("promptfl")
    method, _, _ = build(backbone("tower_a"), context_length=meta["n_ctx"], alpha=100.0)
    restore(method.shared(), {"ctx": arrays["param/ctx"]})
    classes = method.tokenize(meta["class_names"], "")
    method._names = classes.names  # as if these were the observed ones
    images, labels = torch.from_numpy(arrays["in/images"]), torch.tensor(meta["labels"])
    loss = method.loss(images, labels, classes)["loss"]
    close(loss, arrays["out/loss"], 1e-5)
    loss.backward()
    largest = float(np.abs(arrays["grad/ctx"]).max())
    close(method.ctx.grad, arrays["grad/ctx"], 1e-4 * largest)


def test_nothing_of_the_cache_is_sent_or_stored(backbone):
    method, _, _ = build(backbone("tower_a"))
    assert list(snapshot(method.shared())) == ["ctx"]
    assert snapshot(method.private()) == {}
    assert list(method.state_dict()) == ["ctx"]
    assert method.parameter_counts() == {"shared": 256, "private": 0, "trainable": 256}
    cached = method._keys.numel() + method._values.numel()
    assert cached == 3 * (32 + 4)  # n (d_e + C)
    assert not method._keys.requires_grad


def test_batches_of_the_cache_change_nothing(backbone, monkeypatch):
    one, _, _ = build(backbone("tower_a"))
    monkeypatch.setattr(pfedprompt, "BATCH", 2)
    two, _, _ = build(backbone("tower_a"))
    close(two._keys, one._keys.numpy(), 1e-6)
    assert torch.equal(two._values, one._values)


def test_a_site_without_training_images_and_the_server_have_the_prompt(backbone, tower):
    method, base, _ = build(backbone("tower_a"), labels=[])
    _, arrays = read_fixture("promptfl")
    images = torch.from_numpy(arrays["in/images"])
    _, prompt = prompt_logits(method, images, base)
    close(method.logits(images, base), prompt.astype(np.float32), 5e-5)
    described = Backbone.describe(tower("tower_a"))
    config = PFedPromptConfig(name="pfedprompt", context_length=4)
    server = build_method(config, described, 0)
    assert torch.equal(server.ctx, method.ctx)
    with pytest.raises(ConfigError, match=r"method.context_length = 74: .* at most 73"):
        build_method(PFedPromptConfig(name="pfedprompt", context_length=74), described, 0)


def test_bfloat16_features_are_compared_in_float32(tower):
    method, base, images = build(Backbone.load(tower("tower_a"), precision="bf16"), labels=[1])
    with method.backbone.autocast(), torch.no_grad():
        logits = method.logits(images, base)
        prompt = method.backbone.logits(method._keys, method.text_features(base))
    assert method._keys.dtype == logits.dtype == torch.float32
    # The image is its own key: the same bf16 features, compared with themselves.
    close(logits - prompt, np.array([[0, 1, 0, 0]], np.float32), 1e-3)
