"""FedOTP: a global and a local prompt share the patches of an image (METHODS section 4).

Source: Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated
Learning, CVPR 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.backbone import unit
from blend_core.optimal_transport import Solver, transport_plan
from blend_core.prompts import PromptConfig, PromptMethod, new_context

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class FedOTPConfig(PromptConfig):
    """Settings of FedOTP; `context_length` is that of each of the two prompts."""

    epsilon: float = Field(
        0.1, ge=1e-4, le=100.0, description="entropic regularisation, in units of 1 - cosine"
    )
    mass: float = Field(
        0.8, ge=1e-6, le=1.0, description="gamma_ot, total mass of a plan; solver cot only"
    )
    solver: Solver = Field(
        "cot", description="cot: patches give at most 1/M each; sinkhorn: all of it, mass 1"
    )
    threshold: float = Field(
        1e-3,
        gt=0.0,
        le=1e12,
        description="mean change of the raw scalings over the batch below which the solver stops",
    )
    max_iterations: int = Field(
        100, ge=1, le=100_000, description="iterations after which the solver stops anyway"
    )


class FedOTP(PromptMethod):
    """Patches are moved to the two prompts of a class, and score by what moves:

        S_{mj} = <n(f_m), n(t_{j,c})>,  f_m the M patch features, j = global, local;
        logit_c = tau sum_{m,j} Pi_{mj} S_{mj},  Pi the plan of cost 1 - S (`transport_plan`).
        L = CE(logits, y)

    The plan is a constant of the backward pass. All image-class pairs of a batch stop together,
    so an image's logits depend on the batch it is in, in evaluation too. S and the plans are
    [B, C, M, 2], the latter in float64: with 32 images, 500 classes and 196 patches 50 MB each.
    """

    Config = FedOTPConfig

    def __init__(self, config: FedOTPConfig, backbone: Backbone, seed: int) -> None:
        backbone.require_transformers("patch tokens")
        super().__init__(config, backbone, seed)
        self.config = config
        length, width = config.context_length, backbone.text_width
        self.ctx_global = new_context(seed, "ctx_global", length, width)
        self.ctx_local = new_context(seed, "ctx_local", length, width)

    def shared(self) -> dict[str, nn.Parameter]:
        """The global context [m, d_t]."""
        return self.named("ctx_global")

    def private(self) -> dict[str, nn.Parameter]:
        """The local context [m, d_t]."""
        return self.named("ctx_local")

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [2, C, d_e]: global, local."""
        contexts = (self.ctx_global, self.ctx_local)
        return torch.stack([self.features(classes, context) for context in contexts])

    def patch_features(self, images: Tensor) -> Tensor:
        """Normalised features [B, M, d_e] of the patches."""
        return unit(self.backbone.project_image(self.backbone.encode_patches(images)))

    def match(self, images: Tensor, text: Tensor) -> tuple[Tensor, Tensor, int]:
        """Logits [B, C], plans [B, C, M, 2] and the iterations that the solver took.

        Raises:
            RunError: a plan is not finite.
        """
        patches = self.patch_features(images)
        config = self.config
        with torch.autocast(images.device.type, enabled=False):
            similarity = torch.einsum("bmd,jcd->bcmj", patches, text)
            plan, iterations = transport_plan(
                1.0 - similarity,
                config.epsilon,
                config.mass,
                config.solver,
                config.threshold,
                config.max_iterations,
            )
            logits = self.backbone.temperature * (plan * similarity).sum(dim=(-2, -1))
        return logits, plan, iterations

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C]."""
        return self.match(images, text)[0]

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy; beside it the solver's iterations, which reach the statistics."""
        logits, _, iterations = self.match(images, self.text_features(classes))
        return {
            "loss": F.cross_entropy(logits, labels),
            "transport_iterations": torch.tensor(float(iterations)),
        }
