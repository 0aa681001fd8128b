"""A frozen open_clip model: its towers, its preprocessing and its text inputs.

The forward passes are written over open_clip's own weights and equal open_clip's forward to
1e-5 (tested), with three differences that only save work: fused attention, text cut after the
longest end-of-text position, and a last block that is computed for the pooled token alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from open_clip.model import CLIP
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blend_core.adapters import BlockAdapter
from blend_core.config import BackboneConfig, Precision
from blend_core.data.transforms import Preprocess
from blend_core.errors import ConfigError
from blend_core.weights import build_model, load_weights, preprocess_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# One per block of a tower.
Adapters = Sequence[BlockAdapter | None] | None


# Compared by identity, so that what is computed for a class list can be kept under it.
@dataclass(frozen=True, eq=False)
class Classes:
    """The class prompts that compete in one decision.

    Attributes:
        names: the class names, C of them.
        tokens: token ids, int64 [C, L]; L is the longest end-of-text position plus one.
        end: position of each prompt's end-of-text token, int64 [C].
    """

    names: tuple[str, ...]
    tokens: Tensor
    end: Tensor


def unit(features: Tensor) -> Tensor:
    """n(.): features [..., d] at L2 norm 1, in float32 whatever the precision."""
    return F.normalize(features.float(), dim=-1)


class Backbone:
    """A frozen CLIP. Not a module on purpose: its weights belong to no method's state.

    Attributes:
        name: the open_clip model name.
        model: the open_clip model, in eval mode, without gradients.
        preprocess: image size, mean, std and interpolation that the weights expect.
        text_chunk: class prompts that pass through the text tower at a time.
        dtype: of the matrix products; not float32: call `autocast` around the forward passes.
    """

    def __init__(
        self,
        name: str,
        model: CLIP,
        preprocess: Preprocess,
        text_chunk: int = 256,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = name
        self.model = model
        self.preprocess = preprocess
        self.text_chunk = text_chunk
        self.dtype = dtype
        self.context_length = int(model.context_length)
        self._tokenizer = SimpleTokenizer(context_length=self.context_length)
        _refuse_unknown_text_tower(name, model)

    @classmethod
    def load(
        cls,
        config: BackboneConfig,
        device: str | torch.device = "cpu",
        precision: Precision = "fp32",
    ) -> Backbone:
        """Load weights onto a device, those of matrix products in the precision's dtype.

        Raises:
            ConfigError: one line that says how to mend.
        """
        model = build_model(config)
        load_weights(model, config)
        model.to(device)
        dtype = DTYPES[precision]
        preprocess = Preprocess(**preprocess_settings(config, model))
        if dtype != torch.float32:
            _cast_products(model, dtype)
        return cls(config.name, model, preprocess, config.text_chunk, dtype)

    @classmethod
    def describe(cls, config: BackboneConfig) -> Backbone:
        """The model without weights (meta device): enough for names and shapes of a method."""
        model = build_model(config)
        preprocess = Preprocess(**preprocess_settings(config, model))
        return cls(config.name, model, preprocess, config.text_chunk)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.logit_scale.device
        return device

    def autocast(self) -> AbstractContextManager[Any]:
        """Run matrix products in `dtype`; everything else, and what is trained, stays float32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def logits(self, features: Tensor, text: Tensor) -> Tensor:
        """tau <features, text> in float32 whatever the precision: [B, C] of [B, d_e], [C, d_e].

        METHODS eq. (0), for features that are normalised where the method wants them so.
        """
        with torch.autocast(features.device.type, enabled=False):
            return self.temperature * features.float() @ text.float().T

    @property
    def vision_width(self) -> int:
        """Width d_v of the vision tower."""
        return int(self.model.visual.transformer.width)

    @property
    def vision_layers(self) -> int:
        """Number of blocks of the vision tower."""
        return len(self.model.visual.transformer.resblocks)

    @property
    def text_width(self) -> int:
        """Width d_t of the text tower."""
        return int(self.model.transformer.width)

    @property
    def text_layers(self) -> int:
        """Number of blocks of the text tower."""
        return len(self.model.transformer.resblocks)

    @property
    def embed_dim(self) -> int:
        """Dimension d_e of the joint space."""
        return int(self.model.text_projection.shape[1])

    @property
    def temperature(self) -> Tensor:
        """tau = exp(logit_scale), a scalar: 100 for the OpenAI weights."""
        temperature: Tensor = self.model.logit_scale.exp().reshape(())
        return temperature

    @cached_property
    def has_blocks(self) -> bool:
        """Whether both towers are plain transformers whose blocks can take adapters."""
        visual = self.model.visual
        if not isinstance(visual, VisionTransformer):
            return False
        if visual.attn_pool is not None or visual.pool_type != "tok":
            return False
        blocks = [*visual.transformer.resblocks, *self.model.transformer.resblocks]
        return all(type(block) is ResidualAttentionBlock for block in blocks)

    def require_transformers(self, what: str = "blocks for adapters") -> None:
        """Raise `ConfigError` unless both towers are plain transformers; `what` is missing else."""
        if not self.has_blocks:
            raise ConfigError(
                f"backbone.name = {self.name!r}: its image tower is not a class-token vision "
                f"transformer, so it has no {what}; choose a ViT model, e.g. ViT-B-16-quickgelu"
            )

    def tokenize(self, names: Sequence[str], template: str) -> Classes:
        """Build the prompts of a class list and cut them to the longest one.

        Exact because the text tower is causal: no token sees what comes after it.

        Args:
            names: class names, at least one; underscores are read as spaces.
            template: prompt with one {} for the name.

        Raises:
            ConfigError: a prompt does not fit the text context; names the class.
        """
        prompts = [template.replace("{}", name.replace("_", " ")) for name in names]
        for name, prompt in zip(names, prompts, strict=True):
            length = len(self._tokenizer.encode(prompt)) + 2
            if length > self.context_length:
                raise ConfigError(
                    f"class name too long: {name[:80]!r} makes a prompt of {length} tokens, "
                    f"{self.name} takes {self.context_length}; shorten the name or the template"
                )
        tokens = self._tokenizer(prompts)
        end = tokens.argmax(dim=-1)
        tokens = tokens[:, : int(end.max()) + 1]
        # Without weights (meta device) the tokens stay real: their lengths can be checked.
        device = "cpu" if self.device.type == "meta" else self.device
        return Classes(tuple(names), tokens.to(device), end.to(device))

    def encode_image(self, images: Tensor, adapters: Adapters = None) -> Tensor:
        """Class token after the last block, before the final norm.

        Args:
            images: normalised images [B, 3, S, S].
            adapters: one per block (or None).

        Returns:
            zeta [B, d_v] (METHODS 10.2).
        """
        x = self._embed_image(images)
        pooled = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        blocks = self.model.visual.transformer.resblocks
        return _tower(blocks, x, adapters, pooled, causal=False).squeeze(1)

    def encode_patches(self, images: Tensor) -> Tensor:
        """Patch tokens [B, M, d_v] after the last block, without the class token."""
        x = self._embed_image(images)
        return _tower(self.model.visual.transformer.resblocks, x, None, None, causal=False)[:, 1:]

    def _embed_image(self, images: Tensor) -> Tensor:
        """Class token and patches with their positions, [B, 1 + M, d_v]."""
        visual = self.model.visual
        first = visual.class_embedding
        x = visual.conv1(images).flatten(2).transpose(1, 2).to(first.dtype)
        x = torch.cat([first.expand(x.shape[0], 1, -1), x], dim=1) + visual.positional_embedding
        embedded: Tensor = visual.ln_pre(x)
        return embedded

    def project_image(self, zeta: Tensor, norm: bool = True) -> Tensor:
        """Map image tokens [..., d_v] into the joint space [..., d_e], by default after LN_post."""
        visual = self.model.visual
        projected: Tensor = (visual.ln_post(zeta) if norm else zeta) @ visual.proj
        return projected

    def image_features(self, images: Tensor, adapters: Adapters = None) -> Tensor:
        """Image features [B, d_e] of normalised images; without adapters of any image tower."""
        if self.has_blocks:
            return self.project_image(self.encode_image(images, adapters))
        features: Tensor = self.model.visual(images)
        return features

    def encode_text(
        self,
        classes: Classes,
        adapters: Adapters = None,
        projection_change: Tensor | None = None,
    ) -> Tensor:
        """Text features [C, d_e] of the class prompts, not normalised; see `encode_embeddings`."""
        embeddings = self.model.token_embedding(classes.tokens)
        return self.encode_embeddings(embeddings, classes.end, adapters, projection_change)

    def encode_embeddings(
        self,
        embeddings: Tensor,
        end: Tensor,
        adapters: Adapters = None,
        projection_change: Tensor | None = None,
    ) -> Tensor:
        """Text features [C, d_e] of token embeddings, not normalised.

        At most `text_chunk` prompts pass through the tower at a time. If there are more and a
        gradient is wanted, a chunk's activations are computed again in the backward pass, so
        that memory does not grow with the number of classes.

        Args:
            embeddings: of the tokens, [C, L, d_t], without positions.
            end: position of each prompt's end-of-text token, int64 [C].
            adapters: one per block (or None).
            projection_change: added to the frozen text projection [d_t, d_e].
        """

        def encode(x: Tensor, pooled: Tensor) -> Tensor:
            model = self.model
            x = x + model.positional_embedding[: x.shape[1]]
            x = _tower(model.transformer.resblocks, x, adapters, pooled, causal=True).squeeze(1)
            projection = model.text_projection
            features: Tensor = model.ln_final(x) @ (
                projection if projection_change is None else projection + projection_change
            )
            return features

        chunks = list(
            zip(embeddings.split(self.text_chunk), end.split(self.text_chunk), strict=True)
        )
        if len(chunks) == 1:
            return encode(*chunks[0])
        if not torch.is_grad_enabled():
            return torch.cat([encode(*chunk) for chunk in chunks])
        drawing = next((a.draws for a in adapters or () if a and a.draws is not None), None)
        chunk_again = partial(_wound_back, drawing)
        return torch.cat(
            [
                checkpoint(
                    encode,
                    *chunk,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=chunk_again,
                )
                for chunk in chunks
            ]
        )


def _wound_back(
    draws: torch.Generator | None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a pass and of its repetition, in which the generator draws the same again."""
    if draws is None:
        return nullcontext(), nullcontext()
    state: list[Tensor] = []

    @contextmanager
    def first() -> Iterator[None]:
        state.append(draws.get_state())
        yield

    @contextmanager
    def again() -> Iterator[None]:
        now = draws.get_state()
        draws.set_state(state[0])
        try:
            yield
        finally:
            draws.set_state(now)

    return first(), again()


def _cast_products(model: CLIP, dtype: torch.dtype) -> None:
    """Keep the weights of matrix products in `dtype`, so that no step has to cast them."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(dtype)
        elif isinstance(module, nn.MultiheadAttention):
            module.in_proj_weight.data = module.in_proj_weight.data.to(dtype)
            module.in_proj_bias.data = module.in_proj_bias.data.to(dtype)
    for matrix in (getattr(model.visual, "proj", None), model.text_projection):
        if isinstance(matrix, nn.Parameter):
            matrix.data = matrix.data.to(dtype)


def _refuse_unknown_text_tower(name: str, model: Any) -> None:
    known = (
        isinstance(model, CLIP)
        and model.text_pool_type == "argmax"
        and model.attn_mask is not None
        and isinstance(model.text_projection, torch.nn.Parameter)
        and model.vocab_size == 49408
    )
    if not known:
        raise ConfigError(
            f"backbone.name = {name!r}: its text tower is not CLIP's causal transformer with the "
            "CLIP vocabulary; choose a model such as ViT-B-16-quickgelu"
        )


def _tower(
    blocks: Sequence[ResidualAttentionBlock],
    x: Tensor,
    adapters: Adapters,
    pooled: Tensor | None,
    causal: bool,
) -> Tensor:
    """Run the blocks on x [B, T, d]: all tokens, or the token at `pooled` [B] alone, [B, 1, d]."""
    modules = [None] * len(blocks) if adapters is None else list(adapters)
    for block, adapter in zip(blocks[:-1], modules[:-1], strict=True):
        x = _block(block, x, adapter, None, causal)
    return _block(blocks[-1], x, modules[-1], pooled, causal)


def _block(
    block: ResidualAttentionBlock,
    x: Tensor,
    adapter: BlockAdapter | None,
    rows: Tensor | None,
    causal: bool,
) -> Tensor:
    """One pre-norm block with what its adapter adds (METHODS 0.1, eq. 2 and section 11).

    With `rows` [B], only that token of each sequence is computed: [B, 1, d].
    """
    attention = block.attn
    normed = block.ln_1(x)
    query_input = normed
    mask = None
    if rows is not None:
        index = torch.arange(x.shape[0], device=x.device)
        x, query_input = x[index, rows].unsqueeze(1), normed[index, rows].unsqueeze(1)
        if causal:
            positions = torch.arange(normed.shape[1], device=x.device)
            mask = (positions <= rows.unsqueeze(1))[:, None, None, :]
    d = normed.shape[-1]
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if rows is None:
        query, key, value = F.linear(normed, weight, bias).chunk(3, dim=-1)
    else:
        query = F.linear(query_input, weight[:d], bias[:d])
        key, value = F.linear(normed, weight[d:], bias[d:]).chunk(2, dim=-1)
    added = adapter.to_attention(normed, query_input) if adapter is not None else None
    if added is not None:
        query, key, value = query + added[0], key + added[1], value + added[2]
    heads = attention.num_heads
    mixed = F.scaled_dot_product_attention(
        _split(query, heads),
        _split(key, heads),
        _split(value, heads),
        attn_mask=mask,
        is_causal=causal and rows is None,
    )
    mixed = mixed.transpose(1, 2).flatten(2)
    hidden = x + block.ls_1(attention.out_proj(mixed))
    out: Tensor = hidden + block.ls_2(block.mlp(block.ln_2(hidden)))
    if adapter is not None:
        for more in (adapter.to_mlp(hidden), adapter.to_output(x, query_input)):
            out = out if more is None else out + more
    return out


def _split(x: Tensor, heads: int) -> Tensor:
    """[B, T, d] -> [B, heads, T, d / heads]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)
