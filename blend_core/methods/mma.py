"""MMA and pFedMMA: adapters in the upper blocks of both towers, coupled by a shared middle layer.

Source: METHODS sections 8 (MMA, everything averaged) and 9 (pFedMMA, the middle layers averaged).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.adapters import (
    BlockAdapter,
    CoupledAdapter,
    ParallelAdapter,
    kaiming_linear,
    per_block,
    require_rank,
)
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


class GeluAdapter(ParallelAdapter):
    """A parallel adapter with a single GELU, behind the down layer."""

    def forward(self, x: Tensor, middle: nn.Module | None = None) -> Tensor:
        """Map x [..., width] to [..., width], through a layer rank -> rank if there is one."""
        hidden = F.gelu(self.down(x))
        out: Tensor = self.up(hidden if middle is None else middle(hidden))
        return out


ADAPTERS = {"relu_twice": ParallelAdapter, "gelu_once": GeluAdapter}


class CoupledTowers(Method):
    """The model of MMA (Yang et al., CVPR 2024), which pFedMMA (Ghiasvand et al., 2025) keeps.

    In each of the last k blocks of either tower, for all tokens (METHODS eq. 1):
        y = s Up(ReLU(Mid(ReLU(Down(LN1(x)))))),    next x = Block(x) + y
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
        kind = ADAPTERS[config.activation]

        def tower(part: str) -> nn.ModuleDict:
            options = (config.scale, config.tap, config.gradient_scaling)
            return nn.ModuleDict(
                {
                    str(block): kind(seed, f"{part}.{block}", widths[part], rank, *options)
                    for block in range(depths[part] - count + 1, depths[part] + 1)
                }
            )

        self.vision, self.text = tower("vision"), tower("text")
        self.middle = nn.ModuleDict(
            {
                str(i): kaiming_linear(seed, f"middle.{i}", rank, rank, "out")
                for i in range(1, count + 1)
            }
        )

    def blocks(self, tower: nn.ModuleDict, total: int) -> list[BlockAdapter | None]:
        """What is added in each of the `total` blocks of a tower."""
        pairs = zip(tower.items(), self.middle.values(), strict=True)
        coupled = {
            block: CoupledAdapter(cast(ParallelAdapter, adapter), middle)
            for (block, adapter), middle in pairs
        }
        return per_block(coupled, total)

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised features [C, d_e] of the adapted text tower."""
        adapters = self.blocks(self.text, self.backbone.text_layers)
        return F.normalize(self.backbone.encode_text(classes, adapters), dim=-1)

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] of the adapted vision tower."""
        adapters = self.blocks(self.vision, self.backbone.vision_layers)
        features = self.backbone.project_image(self.backbone.encode_image(images, adapters))
        return self.backbone.logits(F.normalize(features, dim=-1), text)

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy."""
        return {"loss": F.cross_entropy(self.logits(images, classes), labels)}

    def _named(self, *parts: str) -> dict[str, nn.Parameter]:
        named = sorted(self.named_parameters())
        return {name: value for name, value in named if name.split(".")[0] in parts}


class MmaFedAvg(CoupledTowers):
    """MMA, all of it averaged."""

    def shared(self) -> dict[str, nn.Parameter]:
        """Adapters and middle layers."""
        return self._named("vision", "text", "middle")


class PFedMMA(CoupledTowers):
    """pFedMMA: the middle layers are averaged, every site keeps its own adapters."""

    def shared(self) -> dict[str, nn.Parameter]:
        """The middle layers."""
        return self._named("middle")

    def private(self) -> dict[str, nn.Parameter]:
        """Down and up layers of both towers."""
        return self._named("vision", "text")
