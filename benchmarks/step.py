"""One training step of BLEND, against the same arithmetic over open_clip's own blocks.

Both run in this process, in turn, so that their ratio means something on a noisy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import cast

import open_clip
import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from torch import Tensor

from blend_core.adapters import ParallelAdapter
from blend_core.backbone import Backbone, Classes
from blend_core.config import BackboneConfig
from blend_core.methods import build_method
from blend_core.methods.blend import Blend, BlendConfig


def measure(model: str, batch: int, classes: int, repeats: int) -> None:
    """Print seconds of both kinds of step and their ratio; weights are random."""
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone = _random_backbone(model, device)
    method = build_method(BlendConfig(name="blend"), backbone, 0)
    assert isinstance(method, Blend)
    size = backbone.preprocess.size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator).to(device)
    labels = torch.randint(classes, (batch,), generator=generator).to(device)
    prompts = backbone.tokenize([f"thing number {n}" for n in range(classes)], "a photo of a {}.")
    full = _full_length(backbone, prompts)
    steps = {
        "ours": lambda: method.loss(images, labels, prompts)["loss"],
        "open_clip's blocks": lambda: _reference_loss(method, images, labels, full),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, loss in steps.items():
            taken = _timed(loss, device)
            if repeat:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        console.print(f"{name:20} {value:.2f} s a step", highlight=False)
    ours, theirs = medians.values()
    console.print(
        f"ratio {ours / theirs:.2f} ({model}, batch {batch}, {classes} classes, {device}, "
        f"{torch.get_num_threads()} threads)",
        highlight=False,
    )


def _timed(loss: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    loss().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _random_backbone(model: str, device: str) -> Backbone:
    described = Backbone.describe(BackboneConfig(name=model, weights="random"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        filled = open_clip.create_model(model, pretrained=None)
    filled.requires_grad_(False).eval().to(device)
    return Backbone(model, filled, described.preprocess)


def _full_length(backbone: Backbone, prompts: Classes) -> Tensor:
    tokens = torch.zeros(len(prompts.names), backbone.context_length, dtype=torch.long)
    tokens[:, : prompts.tokens.shape[1]] = prompts.tokens.cpu()
    return tokens.to(backbone.device)


def _reference_loss(method: Blend, images: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    """BLEND's loss with open_clip's block forward, all tokens in every block, text at full
    length: what an implementation with wrapped blocks computes."""
    model, config = method.backbone.model, method.config
    visual = model.visual
    x = visual._embeds(images)
    for block, adapter in zip(visual.transformer.resblocks, method.vision.values(), strict=True):
        x = block(x) + cast(ParallelAdapter, adapter).to_output(x, block.ln_1(x))
    zeta = x[:, 0]
    general = visual.ln_post(zeta) @ visual.proj
    personal = (zeta + (method.proj(zeta) if method.proj is not None else 0)) @ visual.proj
    t = model.token_embedding(tokens) + model.positional_embedding
    for block, adapter in zip(model.transformer.resblocks, method.text.values(), strict=True):
        added = cast(ParallelAdapter, adapter).to_output(t, block.ln_1(t))
        t = block(t, attn_mask=model.attn_mask) + added
    rows = torch.arange(len(tokens), device=tokens.device)
    text = F.normalize(model.ln_final(t)[rows, tokens.argmax(-1)] @ model.text_projection, dim=-1)
    anchor, tau = F.normalize(general, dim=-1), method.backbone.temperature
    fused = (1 - config.gamma) * anchor + config.gamma * F.normalize(personal, dim=-1)
    anchor_loss = F.cross_entropy(tau * anchor @ text.T, labels)
    fused_loss = F.cross_entropy(tau * fused @ text.T, labels)
    return (1 - config.lambda_) * anchor_loss + config.lambda_ * fused_loss
