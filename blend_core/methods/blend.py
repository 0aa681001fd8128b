"""BLEND: shared bottleneck adapters in both towers, a private projection adapter behind vision.

Source: METHODS section 10 (modules 10.1, forward 10.2, loss 10.3, partition 10.4) and the
aggregation ablations of section 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import BeforeValidator, ConfigDict, Field
from torch import Tensor, nn

from blend_core.adapters import Bottleneck, ParallelAdapter, per_block
from blend_core.backbone import unit
from blend_core.config import MethodConfig
from blend_core.errors import ConfigError
from blend_core.methods.base import Method

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes

Layers = Literal["all"] | list[int]


def _is_rank(value: object) -> object:
    if value in ("none", "full") or (type(value) is int and value >= 1):
        return value
    raise ValueError("expected a number from 1 to the width, none or full")


Rank = Annotated[int | str, BeforeValidator(_is_rank)]

# Which of vision (V), text (T) and projection (P) adapters are averaged (METHODS 12).
# The unfrozen text projection belongs to the text tower.
TEXT = ("text", "text_projection")
PARTS = ("vision", *TEXT, "proj")
AGGREGATED: dict[str, tuple[str, ...]] = {
    "blend": ("vision", *TEXT),
    "full": PARTS,
    "none": (),
    "vision": ("vision",),
    "text": TEXT,
}


class BlendConfig(MethodConfig):
    """Settings of BLEND; defaults are those of the paper."""

    vision_rank: Rank = Field(
        16, description="rank r of the vision adapters, 1 to the width, none or full (the width)"
    )
    text_rank: Rank = Field(16, description="rank r of the text adapters, as vision_rank")
    projection_rank: Rank = Field(
        256, description="rank r_p of the private projection adapter, as vision_rank"
    )
    gamma: float = Field(
        0.09, ge=0.0, le=1.0, description="weight of the personal head in the fused features"
    )
    lambda_: float = Field(
        0.2, ge=0.0, le=1.0, alias="lambda", description="weight of the fused loss; rest: anchor"
    )
    scale: float = Field(0.001, gt=0.0, le=10.0, description="s, scale of the tower adapters")
    tap: Literal["ln1", "raw"] = Field(
        "ln1", description="input of a tower adapter: LN1 of the block input, or the input itself"
    )
    gradient_scaling: bool = Field(
        True, description="tower adapters receive 1/s times their true gradient"
    )
    bias: bool = Field(True, description="biases in all adapters")
    p_head_input: Literal["raw", "post_ln"] = Field(
        "raw", description="personal head sees the class token before or after the final norm"
    )
    fusion_norm: Literal["per_branch", "after_sum"] = Field(
        "per_branch", description="normalise both heads before the sum, or the sum"
    )
    vision_layers: Layers = Field("all", description="blocks with an adapter, from 1, or all")
    text_layers: Layers = Field("all", description="blocks with an adapter, from 1, or all")
    train_text_projection: bool = Field(
        False, description="ablation: train and average a change of the text projection, too"
    )
    aggregate: Literal["blend", "full", "none", "vision", "text"] = Field(
        "blend",
        description="what is averaged: blend (both towers), full (and the projection), none, "
        "vision, text; the rest stays private",
    )

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Blend(Method):
    """The anchor head is CLIP with adapted towers; the fused head adds the personal branch.

    In every block of both towers, for all tokens (METHODS eq. 2):
        next x = Block(x) + s Up(ReLU(Down(LN1(x))))
    With zeta the class token after the last block (METHODS 10.2, released form):
        anchor_c = tau <n(g), n(t_c)>,  g = LN_post(zeta) P_v
        fused_c  = tau <(1 - gamma) n(g) + gamma n(p), n(t_c)>,  p = (zeta + delta(zeta)) P_v
        L = (1 - lambda) CE(anchor, y) + lambda CE(fused, y)
    Inference uses the fused logits, for base and new classes alike.
    """

    Config = BlendConfig

    def __init__(self, config: BlendConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        backbone.require_transformers()
        self.config = config

        vision_width, text_width = backbone.vision_width, backbone.text_width
        ranks = {
            "vision": _rank("vision_rank", config.vision_rank, vision_width),
            "text": _rank("text_rank", config.text_rank, text_width),
            "proj": _rank("projection_rank", config.projection_rank, vision_width),
        }

        def tower(part: str, width: int, layers: list[int]) -> nn.ModuleDict:
            options = (config.scale, config.tap, config.gradient_scaling, config.bias)
            return nn.ModuleDict(
                {
                    str(layer): ParallelAdapter(
                        seed, f"{part}.{layer}", width, ranks[part], *options
                    )
                    for layer in layers
                    if ranks[part] > 0
                }
            )

        vision = _layers("vision_layers", config.vision_layers, backbone.vision_layers)
        text = _layers("text_layers", config.text_layers, backbone.text_layers)
        self.vision = tower("vision", vision_width, vision)
        self.text = tower("text", text_width, text)
        self.proj: Bottleneck | None = None
        if ranks["proj"] > 0:
            self.proj = Bottleneck(
                seed, "proj", vision_width, ranks["proj"], down="in", up="zero", bias=config.bias
            )
            # With lambda * gamma = 0 it has no gradient; AdamW would still decay it.
            self.proj.requires_grad_(config.lambda_ * config.gamma > 0)
        # The change of the frozen projection, not the projection: what is sent then starts from
        # zero and needs no weights on the server. Weight decay draws it to the frozen one.
        self.text_projection = (
            nn.Parameter(torch.zeros(text_width, backbone.embed_dim))
            if config.train_text_projection
            else None
        )

    def shared(self) -> dict[str, nn.Parameter]:
        """Adapters that are averaged: both towers, unless `aggregate` says otherwise."""
        averaged = AGGREGATED[self.config.aggregate]
        return self.named(*averaged) if averaged else {}

    def private(self) -> dict[str, nn.Parameter]:
        """Adapters that stay: the projection adapter, unless `aggregate` says otherwise."""
        kept = [part for part in PARTS if part not in AGGREGATED[self.config.aggregate]]
        return self.named(*kept) if kept else {}

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised features [C, d_e] of the adapted text tower."""
        adapters = per_block(dict(self.text.items()), self.backbone.text_layers)
        features = self.backbone.encode_text(
            classes, adapters, projection_change=self.text_projection
        )
        return unit(features)

    def heads(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the general head g and the personal head p, each [B, d_e], raw."""
        adapters = per_block(dict(self.vision.items()), self.backbone.vision_layers)
        zeta = self.backbone.encode_image(images, adapters)
        general = self.backbone.project_image(zeta)
        if self.config.p_head_input == "post_ln":
            zeta = self.backbone.model.visual.ln_post(zeta)
        if self.proj is not None:
            zeta = zeta + self.proj(zeta)
        return general, self.backbone.project_image(zeta, norm=False)

    def anchor_and_fused(self, images: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Anchor and fused logits, each [B, C]."""
        gamma = self.config.gamma
        general, personal = self.heads(images)
        anchor = unit(general)
        if self.config.fusion_norm == "per_branch":
            fused = (1 - gamma) * anchor + gamma * unit(personal)
        else:
            fused = unit((1 - gamma) * general + gamma * personal)
        return self.backbone.logits(anchor, text), self.backbone.logits(fused, text)

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Fused logits [B, C]."""
        return self.anchor_and_fused(images, text)[1]

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """(1 - lambda) CE(anchor) + lambda CE(fused), and its two parts."""
        anchor, fused = self.anchor_and_fused(images, self.text_features(classes))
        loss_anchor, loss_fused = F.cross_entropy(anchor, labels), F.cross_entropy(fused, labels)
        weight = self.config.lambda_
        loss = (1 - weight) * loss_anchor + weight * loss_fused
        return {"loss": loss, "loss_anchor": loss_anchor, "loss_fused": loss_fused}


def _layers(key: str, chosen: Layers, total: int) -> list[int]:
    """Resolve "all" and check a list of block numbers 1..total."""
    if chosen == "all":
        return list(range(1, total + 1))
    layers = list(chosen)
    if len(set(layers)) != len(layers) or any(not 1 <= layer <= total for layer in layers):
        raise ConfigError(f"method.{key} = {layers}: expected different numbers from 1 to {total}")
    return sorted(layers)


def _rank(key: str, rank: Rank, width: int) -> int:
    """A rank as a number; 0 for "none". METHODS 13: "full" is a bottleneck of rank d."""
    number = {"none": 0, "full": width}[rank] if isinstance(rank, str) else rank
    if number > width:
        raise ConfigError(
            f"method.{key} = {rank}: the tower is {width} wide; choose 1 to {width}, none or full"
        )
    return number
