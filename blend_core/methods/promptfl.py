"""PromptFL: one learned context in front of the class names, averaged (METHODS section 3).

Source: Guo et al., PromptFL, 2022, over the context of Zhou et al., CoOp, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn

from blend_core.messages import Tensors
from blend_core.prompts import (
    PromptConfig,
    PromptMethod,
    new_context,
    require_room,
    word_vectors,
)

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class PromptFLConfig(PromptConfig):
    """Settings of PromptFL."""

    init_phrase: str | None = Field(
        None,
        min_length=1,
        description="words that the context starts from; their tokens replace context_length",
    )
    proximal: float = Field(
        0.0,
        ge=0.0,
        le=1e6,
        description="mu of FedProx: mu/2 times the squared distance to the received context",
    )


class PromptFL(PromptMethod):
    """CoOp's context, trained at every site and averaged:

        logit_c = tau <n(z), n(t_c)>,  t_c the text features of [context][name_c].
        L = CE(logits, y) + mu/2 ||context - received context||^2

    Released code computes the second term from detached tensors, so that it does nothing
    (METHODS X12); here it has a gradient. A context that starts from words is stored as its
    difference from their token embeddings: the server then needs no weights to begin with, and
    weight decay draws the context to the words instead of to zero.
    """

    Config = PromptFLConfig

    def __init__(self, config: PromptFLConfig, backbone: Backbone, seed: int) -> None:
        phrase = config.init_phrase
        if phrase is not None:
            length = len(word_vectors(backbone, phrase))
            require_room(backbone, "tokens of method.init_phrase", length)
            config = config.model_copy(update={"context_length": length})
        super().__init__(config, backbone, seed)
        self.config = config
        self.ctx = new_context(seed, "ctx", config.context_length, backbone.text_width)
        if phrase is not None:
            self.ctx = nn.Parameter(torch.zeros_like(self.ctx))
        self._received = self.ctx.detach().clone()

    def shared(self) -> dict[str, nn.Parameter]:
        """The context [m, d_t]."""
        return self.named()

    def begin(self, payload: Tensors, upload: Tensors) -> None:
        """Remember the received context for the proximal term."""
        super().begin(payload, upload)
        self._received = self.ctx.detach().clone()

    def context(self) -> Tensor:
        """The context vectors [m, d_t]."""
        if self.config.init_phrase is None:
            return self.ctx
        return word_vectors(self.backbone, self.config.init_phrase) + self.ctx

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]."""
        return self.features(classes, self.context())

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy and, if asked for, the proximal term."""
        losses = super().loss(images, labels, classes)
        if self.config.proximal == 0:
            return losses
        entropy, distance = losses["loss"], (self.ctx - self._received).square().sum()
        proximal = self.config.proximal / 2 * distance
        return {"loss": entropy + proximal, "loss_ce": entropy, "loss_proximal": proximal}
