"""CLIP-Adapter: a bottleneck behind the frozen features, averaged (METHODS section 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from blend_core.adapters import Bottleneck
from blend_core.backbone import unit
from blend_core.errors import ConfigError
from blend_core.methods.base import AllOrNone, AllOrNoneConfig

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class ClipAdapterConfig(AllOrNoneConfig):
    """Settings of CLIP-Adapter."""

    reduction: int = Field(
        4, ge=1, description="the bottleneck is d_e / reduction wide, rounded down; 1 to d_e"
    )
    ratio: float = Field(
        0.2, gt=0.0, le=1.0, description="alpha, weight of the adapted in the blended features"
    )
    text: bool = Field(False, description="a second adapter, alike, behind the text features")


class ClipAdapter(AllOrNone):
    """CLIP-Adapter (Gao et al., 2021), trained at every site and averaged:

        f' = alpha ReLU(Up ReLU(Down f)) + (1 - alpha) f,    logit_c = tau <n(f'), n(t_c)>
        L = CE(logits, y)

    f are the raw image features; no biases; both layers start from U(+-1/sqrt(inputs)). The
    towers are untouched, so any image tower will do. With `text`, text features pass through an
    adapter of their own, with the same reduction and ratio, before they are normalised.

    Checked against the authors' public code: bottleneck, both ReLUs, no biases, reduction,
    ratio, blending before normalisation, torch's default initialisation. It has no text adapter,
    so ours is unchecked, and a prompt template per dataset where ours is `data.template`; its
    optimiser and rate are set in files outside it and are unchecked, too.
    """

    Config = ClipAdapterConfig
    config: ClipAdapterConfig

    def __init__(self, config: ClipAdapterConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.config = config
        width = backbone.embed_dim
        if config.reduction > width:
            raise ConfigError(
                f"method.reduction = {config.reduction}: the joint space has {width} dimensions; "
                f"choose 1 to {width}"
            )

        def adapter(name: str) -> Bottleneck:
            rank = width // config.reduction
            return Bottleneck(seed, name, width, rank, down="uniform", up="uniform", bias=False)

        self.vision = adapter("vision")
        self.text = adapter("text") if config.text else None

    def residual(self, features: Tensor, adapter: Bottleneck | None) -> Tensor:
        """Normalised mixture of features [..., d_e] and their adapted form."""
        features = features.float()  # The frozen part of the sum keeps its precision.
        if adapter is not None:
            alpha = self.config.ratio
            features = alpha * torch.relu(adapter(features)) + (1 - alpha) * features
        return unit(features)

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]."""
        return self.residual(self.backbone.encode_text(classes), self.text)

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] of the adapted image features."""
        features = self.residual(self.backbone.image_features(images), self.vision)
        return self.backbone.logits(features, text)
