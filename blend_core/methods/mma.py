"""MMA and pFedMMA: adapters in the upper blocks of both towers, coupled by a shared middle layer.

Source: METHODS sections 8 (MMA, everything averaged) and 9 (pFedMMA, the middle layers averaged).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.adapters import (
    Activation,
    BlockAdapter,
    CoupledAdapter,
    ParallelAdapter,
    new_linear,
    per_block,
    require_rank,
)
from blend_core.backbone import unit
from blend_core.config import MethodConfig
from blend_core.errors import ConfigError
from blend_core.methods.base import Method

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class MmaConfig(MethodConfig):
    """Settings of MMA and of pFedMMA."""

    rank: int = Field(
        32,
        ge=1,
        description="rank r of the adapters, size of the middle layers; 1 to the narrower "
        "tower's width",
    )
    last_blocks: int = Field(
        8, ge=1, description="k, how many of the last blocks of either tower have an adapter"
    )
    scale: float = Field(0.001, gt=0.0, le=10.0, description="s, scale of the adapters")
    tap: Literal["ln1", "raw"] = Field(
        "ln1", description="input of an adapter: LN1 of the block input, or the input itself"
    )
    activation: Literal["relu_twice", "gelu_once"] = Field(
        "relu_twice",
        description="ReLU after the down and the middle layer (code), or GELU after down (paper)",
    )
    gradient_scaling: bool = Field(
        True, description="adapters receive 1/s times their true gradient"
    )


# Behind the down layer, and behind the middle one.
ACTIVATIONS: dict[str, tuple[Activation, Activation | None]] = {
    "relu_twice": (torch.relu, torch.relu),
    "gelu_once": (F.gelu, None),
}


class CoupledTowers(Method):
    """The model of MMA (Yang et al., CVPR 2024), which pFedMMA (Ghiasvand et al., 2025) keeps.

    In each of the last k blocks of either tower, for all tokens (METHODS eq. 1):
        next x = Block(x) + s Up(ReLU(Mid(ReLU(Down(LN1(x))))))
        logit_c = tau <n(z), n(t_c)>,    L = CE(logits, y)
    Mid is one layer for the i-th adapted block of both towers. "The last k" and not "from block
    5": towers of different depth are then paired from the top down.

    Public code has a ReLU behind Down and behind Mid. The pFedMMA paper speaks of one GELU-like
    activation; that `gelu_once` puts it behind Down is our reading. Public code also keeps the
    text features of the client that was evaluated first for all clients and rounds (METHODS X1);
    this is not emulated, text features are computed anew in every evaluation.

    Tensors: "vision.<block>." and "text.<block>." with down and up, the block's own number in
    its tower from 1; "middle.<i>.", i = 1 for the lowest adapted block.
    """

    Config = MmaConfig

    def __init__(self, config: MmaConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        backbone.require_transformers()
        widths = {"vision": backbone.vision_width, "text": backbone.text_width}
        depths = {"vision": backbone.vision_layers, "text": backbone.text_layers}
        rank, count = config.rank, config.last_blocks
        require_rank(rank, widths)
        if count > min(depths.values()):
            raise ConfigError(
                f"method.last_blocks = {count}: the vision tower has {depths['vision']} blocks, "
                f"the text tower {depths['text']}; choose 1 to {min(depths.values())}"
            )
        after_down, self.after_middle = ACTIVATIONS[config.activation]

        def tower(part: str) -> nn.ModuleDict:
            options = (config.scale, config.tap, config.gradient_scaling)
            return nn.ModuleDict(
                {
                    str(block): ParallelAdapter(
                        seed, f"{part}.{block}", widths[part], rank, *options, activation=after_down
                    )
                    for block in range(depths[part] - count + 1, depths[part] + 1)
                }
            )

        self.vision, self.text = tower("vision"), tower("text")
        self.middle = nn.ModuleDict(
            {
                str(i): new_linear(seed, f"middle.{i}", rank, rank, "out")
                for i in range(1, count + 1)
            }
        )

    def blocks(self, tower: nn.ModuleDict, total: int) -> list[BlockAdapter | None]:
        """What is added in each of the `total` blocks of a tower."""
        pairs = zip(tower.items(), self.middle.values(), strict=True)
        coupled = {
            block: CoupledAdapter(cast(ParallelAdapter, adapter), middle, self.after_middle)
            for (block, adapter), middle in pairs
        }
        return per_block(coupled, total)

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised features [C, d_e] of the adapted text tower."""
        adapters = self.blocks(self.text, self.backbone.text_layers)
        return unit(self.backbone.encode_text(classes, adapters))

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] of the adapted vision tower."""
        adapters = self.blocks(self.vision, self.backbone.vision_layers)
        return self.backbone.logits(unit(self.backbone.image_features(images, adapters)), text)


class MmaFedAvg(CoupledTowers):
    """MMA, all of it averaged."""

    def shared(self) -> dict[str, nn.Parameter]:
        """Adapters and middle layers."""
        return self.named()


class PFedMMA(CoupledTowers):
    """pFedMMA: the middle layers are averaged, every site keeps its own adapters."""

    def shared(self) -> dict[str, nn.Parameter]:
        """The middle layers."""
        return self.named("middle")

    def private(self) -> dict[str, nn.Parameter]:
        """Down and up layers of both towers."""
        return self.named("vision", "text")
