"""FedPGP: a global context plus a personal low-rank change (METHODS section 5).

Source: Cui et al., Harmonizing Generalization and Personalization in Federated Prompt Learning,
ICML 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.adapters import require_rank
from blend_core.backbone import unit
from blend_core.errors import ConfigError
from blend_core.prompts import PromptConfig, PromptMethod, new_context, word_vectors

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes

PLACEHOLDER = "X"
# METHODS 0.2: the same for every dataset, whatever `data.template`.
HAND_WRITTEN = "a photo of a {}."


class FedPGPConfig(PromptConfig):
    """Settings of FedPGP."""

    rank: int = Field(
        4, ge=1, le=100_000, description="b, rank of the personal change, at most the text width"
    )
    mu: float = Field(1.0, ge=0.0, le=1e6, description="weight of the contrastive term; 0: without")
    kappa: float = Field(
        0.5, gt=0.0, le=1000.0, description="temperature of the contrastive term, in cosines"
    )
    prompts: int = Field(1, ge=1, description="N_p, prompts of a class; must be 1")
    anchor: Literal["placeholder", "hand_written"] = Field(
        "placeholder",
        description="text that the global prompt is held to: m times X before the name (released "
        "code), or a photo of a",
    )


class FedPGP(PromptMethod):
    """The context is sigma + U V; a contrastive term holds sigma to frozen CLIP text and pushes
    the personal text away from it:

        logit_c = tau <n(z), n(t_c)>,  t_c the text features of [sigma + U V][name_c].
        L = CE(logits, y) + mu mean_c -log(e^{s+/kappa} / (e^{s+/kappa} + e^{s-/kappa})),
        s+ = cos(t0_c, t^sigma_c),  s- = cos(t^sigma_c, t_c),

    with t^sigma from the context sigma alone and t0 from the frozen anchor; mean over all classes.
    """

    Config = FedPGPConfig

    def __init__(self, config: FedPGPConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.config = config
        length, width, rank = config.context_length, backbone.text_width, config.rank
        require_rank(rank, {"text": width})
        if config.prompts != 1:
            raise ConfigError(
                f"method.prompts = {config.prompts}: must be 1; with more (published scripts: 2) "
                "every further copy of a class counts as a wrong class"
            )
        self.sigma = new_context(seed, "sigma", length, width)
        self.U = new_context(seed, "U", length, rank)
        self.V = new_context(seed, "V", rank, width)
        # By class list; everything else that they depend on is frozen.
        self._anchors: WeakKeyDictionary[Classes, Tensor] = WeakKeyDictionary()

    def shared(self) -> dict[str, nn.Parameter]:
        """The global context sigma [m, d_t]."""
        return self.named("sigma")

    def private(self) -> dict[str, nn.Parameter]:
        """The factors U [m, b] and V [b, d_t] of the personal change."""
        return self.named("U", "V")

    def tokenize(self, names: Sequence[str], template: str) -> Classes:
        """The names alone. Raises `ConfigError` if one does not fit a prompt of this method."""
        if self.config.anchor == "hand_written":
            self.backbone.tokenize(names, HAND_WRITTEN)
        return super().tokenize(names, template)

    def context(self) -> Tensor:
        """sigma + U V, [m, d_t], in float32 whatever the precision."""
        with torch.autocast(self.sigma.device.type, enabled=False):
            return self.sigma + self.U @ self.V

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e] of the personal prompt."""
        return self.features(classes, self.context())

    def global_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e] of the context sigma."""
        return self.features(classes, self.sigma)

    def anchor_features(self, classes: Classes) -> Tensor:
        """Normalised, constant text features [C, d_e] of the anchor; computed once per classes."""
        if classes not in self._anchors:
            with torch.no_grad():
                self._anchors[classes] = self._new_anchor(classes)
        return self._anchors[classes]

    def _new_anchor(self, classes: Classes) -> Tensor:
        if self.config.anchor == "hand_written":
            prompts = self.backbone.tokenize(classes.names, HAND_WRITTEN)
            return unit(self.backbone.encode_text(prompts))
        word = word_vectors(self.backbone, PLACEHOLDER)
        return self.features(classes, word.expand(self.config.context_length, -1))

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy and, unless its weight is 0, the contrastive term."""
        own = self.text_features(classes)
        entropy = F.cross_entropy(self.scores(images, own, classes), labels)
        if self.config.mu == 0:
            return {"loss": entropy}
        contrast = contrastive(
            self.anchor_features(classes), self.global_features(classes), own, self.config.kappa
        )
        loss = entropy + self.config.mu * contrast
        return {"loss": loss, "loss_ce": entropy, "loss_contrastive": contrast}


def contrastive(anchor: Tensor, shared: Tensor, own: Tensor, kappa: float) -> Tensor:
    """mean_c log(1 + exp((s- - s+) / kappa)) of normalised features [C, d_e], a scalar."""
    pulled, pushed = (anchor * shared).sum(dim=-1), (shared * own).sum(dim=-1)
    return F.softplus((pushed - pulled) / kappa).mean()
