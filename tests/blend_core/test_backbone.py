"""The backbone equals open_clip and the fixtures, and refuses what would be silently wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file
from support import read_fixture, tower_description, tower_state
from torch.nn.functional import normalize

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig
from blend_core.errors import ConfigError
from blend_core.methods import build_method
from blend_core.methods.zero_shot import ZeroShotConfig


def plain_open_clip(name: str) -> open_clip.model.CLIP:
    state = tower_state(name)
    with torch.random.fork_rng():
        model = open_clip.model.CLIP(**tower_description(state))
    model.load_state_dict(state)
    return model.eval()


def write_tower(folder: Path, quick_gelu: bool, suffix: str) -> BackboneConfig:
    state = tower_state("tower_a")
    weights = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, weights)
    else:
        torch.save(state, weights)
    (folder / "model.json").write_text(json.dumps(tower_description(state, quick_gelu)))
    return BackboneConfig(name=str(folder / "model.json"), weights=str(weights))


def test_zero_shot_matches_the_fixture(backbone):
    meta, arrays = read_fixture("zeroshot")
    method = build_method(ZeroShotConfig(name="zero-shot"), backbone("tower_a"), 0)
    images = torch.from_numpy(arrays["in/images"])
    classes = method.backbone.tokenize(meta["class_names"], meta["template"])
    new = method.backbone.tokenize(meta["new_class_names"], meta["template"])
    length = classes.tokens.shape[1]
    assert np.array_equal(classes.tokens, arrays["in/token_ids"][:, :length])
    assert not arrays["in/token_ids"][:, length:].any()
    raw = method.backbone.image_features(images)
    text = method.backbone.encode_text(classes)
    for got, expected, tolerance in [
        (raw, "out/image_features_raw", 5e-5),
        (text, "out/text_features_raw", 5e-5),
        (normalize(raw, dim=-1), "out/image_features", 1e-5),
        (method.text_features(classes), "out/text_features", 1e-5),
        (method.logits(images, classes), "out/logits", 5e-5),
        (method.logits(images, new), "new/logits", 5e-5),
    ]:
        np.testing.assert_allclose(got.detach(), arrays[expected], atol=tolerance, rtol=0)
    labels = torch.tensor(meta["labels"])
    loss = method.loss(images, labels, classes)["loss"]
    assert abs(loss.item() - float(arrays["out/cross_entropy"])) < 1e-5


@pytest.mark.parametrize("name", ["tower_a", "tower_b"])
def test_towers_equal_open_clips_own_forward(backbone, name):
    ours, theirs = backbone(name), plain_open_clip(name)
    size = ours.preprocess.size
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    classes = ours.tokenize(["red fox", "a much longer name than the others", "bus"], "{}")
    full = open_clip.tokenizer.SimpleTokenizer()(list(classes.names))
    with torch.no_grad():
        np.testing.assert_allclose(
            ours.image_features(images), theirs.encode_image(images), atol=1e-5, rtol=0
        )
        np.testing.assert_allclose(
            ours.encode_text(classes), theirs.encode_text(full), atol=1e-5, rtol=0
        )


def test_cutting_text_after_the_longest_prompt_changes_nothing(backbone):
    ours = backbone("tower_b")
    short = ours.tokenize(["red fox", "snow leopard"], "a photo of a {}.")
    full_tokens = open_clip.tokenizer.SimpleTokenizer()(
        ["a photo of a red fox.", "a photo of a snow leopard."]
    )
    full = type(short)(short.names, full_tokens, full_tokens.argmax(-1))
    assert short.tokens.shape[1] == 9
    with torch.no_grad():
        cut, whole = (normalize(ours.encode_text(c), dim=-1) for c in (short, full))
    assert (cut - whole).abs().max() < 1e-6


def test_a_class_name_that_does_not_fit_is_named(backbone):
    name = "very " * 80 + "long name"
    with pytest.raises(ConfigError, match=r"class name too long: 'very .*89 tokens.*77"):
        backbone("tower_a").tokenize(["fox", name], "a photo of a {}.")


def test_underscores_in_names_are_read_as_spaces(backbone):
    ours = backbone("tower_a")
    tokens = ours.tokenize(["snow_leopard", "snow leopard"], "{}").tokens
    assert torch.equal(tokens[0], tokens[1])


def test_backbone_is_frozen_in_eval_mode_and_leaves_the_global_generator_alone(tower):
    state = torch.random.get_rng_state()
    loaded = Backbone.load(tower("tower_a"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not any(b.is_meta for b in loaded.model.buffers())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_half_precision_weights_without_quickgelu_are_refused(tmp_path, suffix):
    config = write_tower(tmp_path, quick_gelu=False, suffix=suffix)
    with pytest.raises(ConfigError, match="need QuickGELU"):
        Backbone.load(config)
    forced = config.model_copy(update={"quick_gelu": True})
    np.testing.assert_allclose(
        Backbone.load(forced).model.ln_final.weight, tower_state("tower_a")["ln_final.weight"]
    )
    Backbone.load(config.model_copy(update={"quick_gelu": False}))


class Archive(torch.nn.Module):
    """Holds a state dict under the names of an OpenAI archive."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1))
        for name, value in state.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_buffer(leaf, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def script_archive(folder: Path, quick_gelu: bool) -> BackboneConfig:
    state = tower_state("tower_a")
    module = Archive({**state, "input_resolution": torch.tensor(32)})
    del module.x
    path = folder / "openai.pt"
    torch.jit.script(module).save(str(path))
    (folder / "model.json").write_text(json.dumps(tower_description(state, quick_gelu)))
    return BackboneConfig(name=str(folder / "model.json"), weights=str(path))


def test_openai_archives_load_and_need_quickgelu_even_when_it_is_switched_off(tmp_path):
    config = script_archive(tmp_path, quick_gelu=True)
    loaded = Backbone.load(config)
    np.testing.assert_array_equal(
        loaded.model.ln_final.weight, tower_state("tower_a")["ln_final.weight"]
    )
    with pytest.raises(ConfigError, match="need QuickGELU"):
        Backbone.load(config.model_copy(update={"quick_gelu": False}))


@pytest.mark.parametrize("name", ["ViT-B-16-quickgelu", "ViT-B-32-quickgelu", "RN50-quickgelu"])
def test_openai_weights_see_images_as_they_were_trained(name):
    # PROTOCOL 6. `describe` loads no weights: what open_clip says of them is all that is needed.
    pre = Backbone.describe(BackboneConfig(name=name, weights="openai")).preprocess
    assert pre.size == 224
    assert pre.mean == (0.48145466, 0.4578275, 0.40821073)
    assert pre.std == (0.26862954, 0.26130258, 0.27577711)
    assert pre.interpolation == "bicubic"


def test_a_resnet_is_refused_for_adapters_but_serves_zero_shot_shapes():
    described = Backbone.describe(BackboneConfig(name="RN50", weights="openai"))
    with pytest.raises(ConfigError, match="no blocks for adapters"):
        described.require_transformers()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BackboneConfig(name="no-such-model", weights="openai"), "unknown to open_clip"),
        (BackboneConfig(name="ViT-B-16", weights="builtin"), "belongs to blend-tiny"),
        (BackboneConfig(name="ViT-B-16", weights="nothing"), "no such file, and not a tag"),
        (BackboneConfig(name="coca_ViT-B-32", weights="openai"), "only open_clip's own CLIP"),
    ],
)
def test_wrong_models_and_weights_get_one_clear_line(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Backbone.load(config)
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_are_refused(tower, tmp_path):
    config = tower("tower_a").model_copy(update={"weights": tower("tower_b").weights})
    with pytest.raises(ConfigError, match="does not fit"):
        Backbone.load(config)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        Backbone.load(config.model_copy(update={"weights": str(broken)}))


def test_class_names_that_the_tiny_clip_never_saw_are_not_all_the_same_to_it():
    tiny = Backbone.load(BackboneConfig())
    with torch.no_grad():
        text = normalize(tiny.encode_text(tiny.tokenize(["cat", "dog", "deer"], "{}")), dim=-1)
    similar = text @ text.T - torch.eye(3)
    assert similar.max() < 0.99


def test_text_in_chunks_gives_the_same_features_and_gradients(backbone, tower):
    """Memory does not grow with the class list: see also the slow test of 1,000 classes."""
    whole = backbone("tower_a")
    config = tower("tower_a").model_copy(update={"text_chunk": 2})
    chunked = Backbone.load(config)
    names = ["red fox", "bus", "snow_leopard", "F-16A", "polka_dotted cup"]
    results = []
    for loaded in (whole, chunked):
        classes = loaded.tokenize(names, "a photo of a {}.")
        shift = torch.zeros(64, requires_grad=True)
        embeddings = loaded.model.token_embedding(classes.tokens) + shift
        features = loaded.encode_embeddings(embeddings, classes.end)
        features.square().sum().backward()
        with torch.no_grad():
            plain = loaded.encode_text(classes)
        results.append((features.detach(), shift.grad, plain))
    for value, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


def test_patch_tokens_equal_open_clips_own(backbone):
    loaded = backbone("tower_a")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    visual = loaded.model.visual
    visual.output_tokens = True
    try:
        with torch.no_grad():
            _, tokens = visual(images)
            patches = loaded.model.visual.ln_post(loaded.encode_patches(images))
    finally:
        visual.output_tokens = False
    assert patches.shape == (2, 16, 128)
    torch.testing.assert_close(patches, tokens, atol=1e-5, rtol=1e-5)


def test_weights_of_products_are_kept_in_the_precision_and_the_rest_in_fp32(tower):
    reduced = Backbone.load(tower("tower_a"), precision="bf16")
    block = reduced.model.visual.transformer.resblocks[0]
    for weight in (block.attn.in_proj_weight, block.attn.out_proj.weight, block.mlp[0].weight):
        assert weight.dtype == torch.bfloat16
    assert block.ln_1.weight.dtype == torch.float32
    assert reduced.model.token_embedding.weight.dtype == torch.float32
    assert reduced.temperature.dtype == torch.float32
