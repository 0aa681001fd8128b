"""FedPHA: a global and a private prompt, pulled and pushed through an SVD (METHODS section 6).

Source: FedPHA, Federated Prompt Learning for Heterogeneous Client Adaptation, 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.backbone import unit
from blend_core.errors import RunError
from blend_core.prompts import PromptConfig, PromptMethod, new_context, require_room

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes

Projection = Literal["thin_tail", "complement"]


class FedPHAConfig(PromptConfig):
    """Settings of FedPHA; `context_length` is that of the global prompt."""

    local_context_length: int | None = Field(
        None, ge=1, le=1000, description="learned vectors of the private prompt; unset: m"
    )
    ratio: float = Field(
        0.8,
        ge=0.0,
        le=1.0,
        description="the first int(m (1 - ratio)) singular directions of the global prompt are "
        "left out of the projection",
    )
    margin: float = Field(
        1.0,
        ge=0.0,
        le=2.0,
        description="alpha, distance of unit text features to which local and global are pushed",
    )
    lambda_pull: float = Field(1.0, ge=0.0, le=1e6, description="weight of pull; 0: without")
    lambda_push: float = Field(1.0, ge=0.0, le=1e6, description="weight of push; 0: without")
    projection: Projection = Field(
        "thin_tail",
        description="thin_tail: onto the remaining directions of the global prompt (released "
        "code); complement: onto all but the left-out ones",
    )
    svd_gradient: bool = Field(
        False,
        description="pull has a gradient through the SVD (released code); it grows without bound "
        "as singular values meet",
    )


class FedPHA(PromptMethod):
    """Both prompts learn to classify; only the private one is used afterwards:

        L = CE(local, y) + CE(global, y) + lambda_pull MSE(n(t^l), n(t^p))
            + lambda_push mean_c max(0, alpha - ||n(t^l_c) - n(t^g_c)||),

    with t^l, t^g, t^p the text features of the contexts l, g and l Q, logits tau <n(z), n(t_c)>,
    and Q the projector made of g (`projector`), constant in the backward pass unless
    `svd_gradient`. MSE is a mean over classes and coordinates. Inference uses l alone, for new
    classes too.
    """

    Config = FedPHAConfig

    def __init__(self, config: FedPHAConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.config = config
        length, width = config.context_length, backbone.text_width
        local = config.local_context_length or length
        require_room(backbone, "method.local_context_length", local)
        self.longest = max(length, local)
        self.ctx_global = new_context(seed, "ctx_global", length, width)
        self.ctx_local = new_context(seed, "ctx_local", local, width)

    def shared(self) -> dict[str, nn.Parameter]:
        """The global context g [m, d_t]."""
        return self.named("ctx_global")

    def private(self) -> dict[str, nn.Parameter]:
        """The local context l [m_l, d_t]."""
        return self.named("ctx_local")

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e] of the local prompt."""
        return self.features(classes, self.ctx_local)

    def global_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e] of the global prompt."""
        return self.features(classes, self.ctx_global)

    def projected_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e] of the local context after the projection.

        Raises:
            RunError: the global context is not finite.
        """
        basis = self.ctx_global if self.config.svd_gradient else self.ctx_global.detach()
        with torch.autocast(basis.device.type, enabled=False):
            context = self.ctx_local @ projector(basis, self.config.ratio, self.config.projection)
        return self.features(classes, context)

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """The sum of both cross-entropies, pull and push, and its parts without their weights."""
        config, image = self.config, unit(self.backbone.image_features(images))
        local, shared = self.text_features(classes), self.global_features(classes)
        parts = {
            "loss_local": F.cross_entropy(self.backbone.logits(image, local), labels),
            "loss_global": F.cross_entropy(self.backbone.logits(image, shared), labels),
        }
        loss = parts["loss_local"] + parts["loss_global"]
        if config.lambda_pull > 0:
            parts["loss_pull"] = F.mse_loss(local, self.projected_features(classes))
            loss = loss + config.lambda_pull * parts["loss_pull"]
        if config.lambda_push > 0:
            parts["loss_push"] = push(local, shared, config.margin)
            loss = loss + config.lambda_push * parts["loss_push"]
        return {"loss": loss, **parts}


def left_out(length: int, ratio: float) -> int:
    """k, singular directions left out: truncated in double precision, as the released code does.

    Hence 1, not 2, of 10 at ratio 0.8.
    """
    return int(length * (1 - ratio))


def projector(context: Tensor, ratio: float, projection: Projection = "thin_tail") -> Tensor:
    """Q [d_t, d_t] from the thin SVD U S V^T of a context [m, d_t].

    "thin_tail": V2 V2^T with the columns of V from k on, of rank at most m - k (13 for 16 vectors
    at ratio 0.8). "complement": I - V1 V1^T with the first k columns, of rank d_t - k.

    Raises:
        RunError: the context is not finite.
    """
    if not torch.isfinite(context).all():
        raise RunError(
            "the global context is not finite; lower train.lr, or set method.svd_gradient to false"
        )
    directions: Tensor = torch.linalg.svd(context, full_matrices=False).Vh
    k = left_out(len(context), ratio)
    if projection == "thin_tail":
        return directions[k:].T @ directions[k:]
    identity = torch.eye(context.shape[1], dtype=context.dtype, device=context.device)
    return identity - directions[:k].T @ directions[:k]


def push(local: Tensor, shared: Tensor, margin: float) -> Tensor:
    """mean_c max(0, margin - ||local_c - shared_c||) of features [C, d_e], a scalar."""
    return F.relu(margin - torch.linalg.vector_norm(local - shared, dim=-1)).mean()
