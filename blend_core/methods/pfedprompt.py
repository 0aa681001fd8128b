"""pFedPrompt: an averaged context and a memory of the site's own images (METHODS section 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.backbone import unit
from blend_core.data.transforms import normalise, prepare_test
from blend_core.prompts import PromptConfig, PromptMethod, new_context

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes
    from blend_core.data import ClientData

# Images per forward pass when the cache is filled.
BATCH = 64


class PFedPromptConfig(PromptConfig):
    """Settings of pFedPrompt."""

    alpha: float = Field(
        1.0, ge=0.0, le=1000.0, description="weight of the cache beside the prompt's logits"
    )
    beta: float = Field(
        5.5, ge=0.0, le=1000.0, description="sharpness of the cache: exp(-beta (1 - cosine))"
    )


class PFedPrompt(PromptMethod):
    """A context as in PromptFL, and at inference a cache of the n training images of the site:

        logit_c = tau <n(z), n(t_c)> + alpha sum_i exp(-beta (1 - <n(z), k_i>)) y_ic
        L = CE(tau <n(z), n(t_c)>, y)

    Keys k_i are the normalised features of the training images in test preparation, values y_i
    their one-hot labels: n (d_e + C) numbers, made anew whenever a site starts, never stored or
    sent. Only the context is trained and averaged. For classes other than the site's base classes
    the cache has no values, and the context decides alone.

    Training leaves the cache out: there every image would find itself. This is our choice.

    Source: pFedPrompt, WWW 2023, whose text and code were not at hand. Its abstract, in a
    translation, has the two parts: the users' consensus learned in text, each user's
    characteristics taken up in the visual space without parameters. A reader's notes have
    attention over few-shot keys and one-hot values, but with class prototypes of spatial features
    as keys, where we keep one final feature per image. Weight and sharpness of the paper are not
    known to us: the formula is Tip-Adapter's (ECCV 2022, seen in its released code), and so are,
    from memory, the defaults of alpha and beta. That code starts its searches for ImageNet from
    a weight of 1.17 and a sharpness of 1.
    """

    Config = PFedPromptConfig

    def __init__(self, config: PFedPromptConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.config = config
        self.ctx = new_context(seed, "ctx", config.context_length, backbone.text_width)
        # Plain attributes, not buffers, so that no state of the module holds images' features.
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._names: tuple[str, ...] = ()

    def shared(self) -> dict[str, nn.Parameter]:
        """The context [m, d_t]."""
        return self.named()

    @torch.no_grad()
    def observe(self, data: ClientData, base: Classes) -> None:
        """Fill the cache: keys [n, d_e], values [n, C], in the order of the training images."""
        preprocess, device = data.preprocess or self.backbone.preprocess, self.backbone.device
        images, labels = data.train.images, data.train.labels
        self._keys, self._values, self._names = None, None, base.names
        keys = []
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            pixels = torch.stack([prepare_test(image, preprocess) for image in batch])
            with self.backbone.autocast():
                images_in = normalise(pixels, preprocess, device)
                keys.append(unit(self.backbone.image_features(images_in)))
        if keys:
            self._keys = torch.cat(keys)
            self._values = F.one_hot(labels, len(base.names)).float().to(device)

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]."""
        return self.features(classes, self.ctx)

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C]: the prompt's, plus the cache's if the classes are the observed ones."""
        features = unit(self.backbone.image_features(images))
        logits = self.backbone.logits(features, text)
        if self._keys is None or self._values is None or classes.names != self._names:
            return logits
        with torch.autocast(features.device.type, enabled=False):
            affinity = torch.exp(self.config.beta * (features @ self._keys.T - 1))
            return logits + self.config.alpha * affinity @ self._values

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy of the prompt's logits."""
        logits = super().scores(images, self.text_features(classes), classes)
        return {"loss": F.cross_entropy(logits, labels)}
