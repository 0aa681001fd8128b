"""AdaptFormer: a bottleneck beside the MLP of every block, averaged (METHODS section 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from blend_core.adapters import BlockAdapter, Bottleneck, dropout, per_block, require_rank
from blend_core.backbone import unit
from blend_core.methods.base import AllOrNone, AllOrNoneConfig

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class AdaptFormerConfig(AllOrNoneConfig):
    """Settings of AdaptFormer."""

    rank: int = Field(64, ge=1, description="rank r of the adapters, 1 to the tower's width")
    scale: float = Field(0.1, gt=0.0, le=10.0, description="s, scale of the adapters")
    towers: Literal["vision", "both"] = Field("vision", description="towers with adapters")
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="share of the bottleneck dropped in training"
    )


@dataclass(frozen=True)
class MlpAdapter(BlockAdapter):
    """s Up(drop(ReLU(Down(h)))), beside the MLP of one block.

    Attributes:
        bottleneck: the two layers.
        scale: s.
        rate: of the dropout.
        draws: what the dropout draws from; None: nothing is dropped.
    """

    bottleneck: Bottleneck
    scale: float
    rate: float
    draws: torch.Generator | None = None

    def to_mlp(self, hidden: Tensor) -> Tensor:
        """What is added to the MLP's output, given the state after attention [B, T, d]."""
        added: Tensor = self.bottleneck(hidden, lambda h: dropout(h, self.rate, self.draws))
        return self.scale * added


class AdaptFormer(AllOrNone):
    """AdaptFormer (Chen et al., 2022) in CLIP's vision tower, or in both, averaged:

        h = x + Attn(LN1(x)),    next x = h + MLP(LN2(h)) + s Up(ReLU(Down(h)))
        logit_c = tau <n(z), n(t_c)>,    L = CE(logits, y)

    in every block, for all tokens; h is not normalised. Down starts from U(+-1/sqrt(d)), which is
    Kaiming-uniform with a = sqrt(5); Up and the biases start from zero, so training starts from
    zero-shot CLIP.

    Checked against the authors' public code: placement, no norm, s, r, initialisation. That code
    also drops 0.1 of the bottleneck in training, a constant there; here it is `dropout`, 0 unless
    set. It trains image and video classifiers with a new head; the text tower, eq. (0) and the
    averaging are ours. Unchecked: whether the paper says otherwise.
    """

    Config = AdaptFormerConfig
    config: AdaptFormerConfig

    def __init__(self, config: AdaptFormerConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        backbone.require_transformers()
        self.config = config
        shapes = {"vision": (backbone.vision_width, backbone.vision_layers)}
        if config.towers == "both":
            shapes["text"] = (backbone.text_width, backbone.text_layers)
        require_rank(config.rank, {part: width for part, (width, _) in shapes.items()})

        def tower(part: str) -> nn.ModuleDict:
            width, layers = shapes.get(part, (0, 0))
            return nn.ModuleDict(
                {
                    str(block): Bottleneck(
                        seed, f"{part}.{block}", width, config.rank, down="uniform", up="zero"
                    )
                    for block in range(1, layers + 1)
                }
            )

        self.vision, self.text = tower("vision"), tower("text")

    def blocks(self, tower: nn.ModuleDict, total: int) -> list[BlockAdapter | None]:
        """What is added in each of the `total` blocks of a tower."""
        scale, rate = self.config.scale, self.config.dropout
        adapters = {
            block: MlpAdapter(cast(Bottleneck, bottleneck), scale, rate, self.draws)
            for block, bottleneck in tower.items()
        }
        return per_block(adapters, total)

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]."""
        adapters = self.blocks(self.text, self.backbone.text_layers)
        return unit(self.backbone.encode_text(classes, adapters))

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] of the adapted vision tower."""
        adapters = self.blocks(self.vision, self.backbone.vision_layers)
        return self.backbone.logits(unit(self.backbone.image_features(images, adapters)), text)
