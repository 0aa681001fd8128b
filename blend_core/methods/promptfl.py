"""PromptFL: one learned context in front of the class names, averaged (METHODS section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.config import MethodConfig
from blend_core.messages import Tensors
from blend_core.methods.base import Method
from blend_core.prompts import (
    encode_context,
    new_context,
    require_room,
    tokenize_names,
    word_vectors,
)

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class PromptFLConfig(MethodConfig):
    """Settings of PromptFL."""

    context_length: int = Field(16, ge=1, le=1000, description="m, learned vectors of a prompt")
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


class PromptFL(Method):
    """CoOp's context, trained at every site and averaged:

        logit_c = tau <n(z), n(t_c)>,  t_c the text features of [context][name_c].
        L = CE(logits, y) + mu/2 ||context - received context||^2

    Released code computes the second term from detached tensors, so that it does nothing
    (METHODS X12); here it has a gradient. A context that starts from words is stored as its
    difference from their token embeddings: the server then needs no weights to begin with.
    """

    Config = PromptFLConfig

    def __init__(self, config: PromptFLConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.config = config
        width = backbone.text_width
        if config.init_phrase is None:
            require_room(backbone, "method.context_length", config.context_length)
            self.ctx = new_context(seed, "ctx", config.context_length, width)
        else:
            length = len(word_vectors(backbone, config.init_phrase))
            require_room(backbone, "tokens of method.init_phrase", length)
            self.ctx = nn.Parameter(torch.zeros(length, width))
        self._received = self.ctx.detach().clone()

    def shared(self) -> dict[str, nn.Parameter]:
        """The context."""
        return {"ctx": self.ctx}

    def receive(self, payload: Tensors, upload: Tensors) -> None:
        """Remember the received context for the proximal term."""
        super().receive(payload, upload)
        self._received = self.ctx.detach().clone()

    def tokenize(self, names: Sequence[str], template: str) -> Classes:
        """The names alone; the context replaces the template."""
        return tokenize_names(self.backbone, names, len(self.ctx))

    def context(self) -> Tensor:
        """The context vectors [m, d_t]."""
        if self.config.init_phrase is None:
            return self.ctx
        return word_vectors(self.backbone, self.config.init_phrase) + self.ctx

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]."""
        return F.normalize(encode_context(self.backbone, classes, self.context()), dim=-1)

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C]."""
        features = F.normalize(self.backbone.image_features(images), dim=-1)
        return self.backbone.logits(features, text)

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy and, if asked for, the proximal term."""
        entropy = F.cross_entropy(self.logits(images, classes), labels)
        if self.config.proximal == 0:
            return {"loss": entropy}
        distance = (self.ctx - self._received.to(self.ctx)).square().sum()
        proximal = self.config.proximal / 2 * distance
        return {"loss": entropy + proximal, "loss_ce": entropy, "loss_proximal": proximal}
