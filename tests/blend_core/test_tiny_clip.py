"""The packaged tiny CLIP keeps what its model card promises, loaded with plain open_clip."""

from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file

import blend_core
from blend_core.data.drawing import render
from blend_core.data.shapes import (
    ALL_COMBINATIONS,
    CLEAN,
    SHIFTED,
    Combination,
    Style,
    benchmark_classes,
    held_out,
)

ASSETS = Path(blend_core.__file__).parent / "assets"
WEIGHTS = ASSETS / "blend-tiny.safetensors"
PER_CLASS = 8


@pytest.fixture(scope="module")
def clip() -> tuple[Any, Any]:
    open_clip.add_model_config(ASSETS / "blend-tiny.json")
    with torch.random.fork_rng(devices=[]):
        model = open_clip.create_model("blend-tiny")
    model.load_state_dict(load_file(WEIGHTS), strict=True)
    return model.eval(), open_clip.get_tokenizer("blend-tiny")


@pytest.fixture(scope="module")
def scores(clip: tuple[Any, Any]) -> dict[Style, torch.Tensor]:
    """Per style, the similarities [60, images a class, 60] of images and names held out."""
    model, tokenizer = clip
    prompts = tokenizer([f"a photo of a {combination.name}." for combination in held_out()])
    shown = [combination for combination in held_out() for _ in range(PER_CLASS)]
    mean = torch.tensor(open_clip.OPENAI_DATASET_MEAN).view(1, 3, 1, 1)
    deviation = torch.tensor(open_clip.OPENAI_DATASET_STD).view(1, 3, 1, 1)
    similarities = {}
    with torch.no_grad():
        text = model.encode_text(prompts, normalize=True)
        for style in (CLEAN, SHIFTED):
            pixels = torch.from_numpy(render(shown, style, np.random.default_rng(11)))
            pixels = (pixels.permute(0, 3, 1, 2) / 255 - mean) / deviation
            image = model.encode_image(pixels, normalize=True)
            similarities[style] = (image @ text.T).view(60, PER_CLASS, 60)
    return similarities


def accuracy(similarities: torch.Tensor, classes: tuple[Combination, ...]) -> float:
    """Top-1 among `classes` only."""
    at = torch.tensor([held_out().index(combination) for combination in classes])
    predicted = similarities[at][:, :, at].argmax(2)
    return float((predicted == torch.arange(len(at))[:, None]).float().mean())


def test_unseen_combinations_are_recognised_in_the_clean_style(
    scores: dict[Style, torch.Tensor],
) -> None:
    assert accuracy(scores[CLEAN], held_out()) >= 0.90


def test_the_shifted_style_leaves_room_to_adapt(scores: dict[Style, torch.Tensor]) -> None:
    assert 0.55 <= accuracy(scores[SHIFTED], held_out()) <= 0.75


def test_each_part_of_the_benchmark_is_harder_when_shifted(
    scores: dict[Style, torch.Tensor],
) -> None:
    split = benchmark_classes()
    for classes in (split.base, split.new, split.development):
        clean, shifted = (accuracy(scores[style], classes) for style in (CLEAN, SHIFTED))
        assert clean >= 0.90
        assert 0.55 <= shifted <= clean - 0.05


def test_the_model_is_what_its_configuration_says(clip: tuple[Any, Any]) -> None:
    model, _ = clip
    assert model.visual.image_size in (48, (48, 48))
    assert model.context_length == 16
    assert any(isinstance(module, open_clip.transformer.QuickGELU) for module in model.modules())
    assert 10 <= model.logit_scale.exp().item() <= 40


def test_weights_are_half_precision_with_only_the_used_token_rows(clip: tuple[Any, Any]) -> None:
    state, tokenizer = load_file(WEIGHTS), clip[1]
    assert {value.dtype for value in state.values()} == {torch.float16}
    assert all(value.isfinite().all() for value in state.values())
    filled = set(state["token_embedding.weight"].any(1).nonzero().flatten().tolist())
    names = tokenizer([f"a photo of a {combination.name}." for combination in ALL_COMBINATIONS])
    assert set(names.unique().tolist()) <= filled
    assert len(filled) < 100
