"""Learned contexts: prompts whose first words are trained vectors (METHODS section 0.2).

The layout is [SOT] [context] [name] [.] [EOT]. What depends on the class list is in `Classes`,
which is made anew for other classes; the context is the method's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn

from blend_core.backbone import unit
from blend_core.config import MethodConfig
from blend_core.errors import ConfigError
from blend_core.methods.base import Method
from blend_core.randomness import torch_generator

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes

# Start of text, one token of a name, the full stop, end of text.
SHORTEST = 4


def new_context(seed: int, name: str, *shape: int) -> nn.Parameter:
    """A context [..., m, d_t] from N(0, 0.02^2); the draw depends on (seed, name) alone."""
    draws = torch_generator(seed, "init", name)
    return nn.Parameter(torch.empty(*shape).normal_(0.0, 0.02, generator=draws))


def require_room(backbone: Backbone, key: str, length: int) -> None:
    """Raise `ConfigError` if a context of `length` vectors leaves no room for a class name."""
    if length + SHORTEST > backbone.context_length:
        raise ConfigError(
            f"{key} = {length}: with a class name it needs at least {length + SHORTEST} token "
            f"positions, {backbone.name} has {backbone.context_length}; choose at most "
            f"{backbone.context_length - SHORTEST}, less with long class names"
        )


def tokenize_names(backbone: Backbone, names: Sequence[str], length: int) -> Classes:
    """Prompts "name." in front of which a context of up to `length` vectors still fits.

    Raises:
        ConfigError: a name leaves no room for the context; names the class.
    """
    classes = backbone.tokenize(names, "{}.")
    longest = int(classes.end.argmax())
    needed = int(classes.end[longest]) + 1 + length
    if needed > backbone.context_length:
        raise ConfigError(
            f"class name too long: {names[longest][:80]!r} with a context of {length} vectors "
            f"makes a prompt of {needed} tokens, {backbone.name} takes {backbone.context_length}; "
            "shorten the name, or the context to at most "
            f"{length - needed + backbone.context_length}"
        )
    return classes


def word_vectors(backbone: Backbone, words: str) -> Tensor:
    """Token embeddings of a phrase [m, d_t], m its number of tokens: a context in words.

    Raises:
        ConfigError: the phrase has no tokens, or more than the tower takes.
    """
    try:
        prompt = backbone.tokenize([words], "{}")
    except ConfigError:
        raise ConfigError(
            f"the phrase {words[:80]!r} has more tokens than the {backbone.context_length - 2} "
            f"that {backbone.name} takes; shorten it"
        ) from None
    tokens = prompt.tokens[0, 1 : int(prompt.end[0])]
    if not len(tokens):
        raise ConfigError(f"the phrase {words!r} has no words")
    vectors: Tensor = backbone.model.token_embedding(tokens).detach()
    return vectors


def encode_context(backbone: Backbone, classes: Classes, context: Tensor) -> Tensor:
    """Text features of every class name after a context, not normalised.

    Args:
        backbone: the frozen CLIP.
        classes: from `tokenize_names`.
        context: learned vectors [m, d_t], the same for all classes.

    Returns:
        Features [C, d_e].
    """
    names = backbone.model.token_embedding(classes.tokens)
    shared = context.to(names.dtype).expand(len(names), -1, -1)
    embeddings = torch.cat([names[:, :1], shared, names[:, 1:]], dim=1)
    return backbone.encode_embeddings(embeddings, classes.end + context.shape[0])


class PromptConfig(MethodConfig):
    """Settings of methods with a learned context."""

    context_length: int = Field(16, ge=1, le=1000, description="m, learned vectors of a context")


class PromptMethod(Method):
    """Base of methods that score frozen image features against prompts with learned contexts:

        logit_c = tau <n(z), n(t_c)>  (METHODS eq. 0), t_c the text features of [context][name_c].

    The template of the data is not used: the context stands in its place.
    """

    # Vectors of the longest context, for which every class name must leave room.
    longest: int

    def __init__(self, config: PromptConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        require_room(backbone, "method.context_length", config.context_length)
        self.longest = config.context_length

    def tokenize(self, names: Sequence[str], template: str) -> Classes:
        """The names alone. Raises `ConfigError` if one does not fit behind the context."""
        return tokenize_names(self.backbone, names, self.longest)

    def features(self, classes: Classes, context: Tensor) -> Tensor:
        """Normalised text features [C, d_e] of the class names after a context [m, d_t]."""
        return unit(encode_context(self.backbone, classes, context))

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] by eq. (0)."""
        return self.backbone.logits(unit(self.backbone.image_features(images)), text)
