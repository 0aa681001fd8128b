"""Zero-shot CLIP: nothing is trained, nothing moves (METHODS section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from blend_core.backbone import unit
from blend_core.config import MethodConfig
from blend_core.methods.base import Method

if TYPE_CHECKING:
    from blend_core.backbone import Classes


class ZeroShotConfig(MethodConfig):
    """Zero-shot CLIP has no settings."""


class ZeroShot(Method):
    """logit_c = tau <n(z), n(t_c)> (METHODS eq. 0)."""

    Config = ZeroShotConfig

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]."""
        return unit(self.backbone.encode_text(classes))

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C]."""
        return self.backbone.logits(unit(self.backbone.image_features(images)), text)
