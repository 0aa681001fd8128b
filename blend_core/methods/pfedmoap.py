"""pFedMoAP: prompts of other clients as experts behind a private gate (METHODS section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.adapters import new_linear
from blend_core.backbone import unit
from blend_core.errors import ConfigError, RunError
from blend_core.messages import FloatArray, Tensors
from blend_core.prompts import PromptConfig, PromptMethod, new_context
from blend_core.randomness import derive_seed

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes

Selection = Literal["nearest", "random"]


class PFedMoAPConfig(PromptConfig):
    """Settings of pFedMoAP."""

    experts: int = Field(
        10,
        ge=1,
        le=1000,
        description="E, largest number of prompts in the mixture, the client's own included; 1: "
        "no mixture",
    )
    selection: Selection = Field(
        "nearest",
        description="whose prompts a client is sent: the nearest ones to its own (as in the "
        "paper), or the first ones in an order drawn once (as in the released code)",
    )
    gate_dim: int = Field(
        128, ge=1, le=65536, description="width of the gate; must divide the joint dimension d_e"
    )
    gate_heads: int = Field(8, ge=1, le=1024, description="heads; must divide gate_dim")
    beta: float = Field(10.0, ge=0.0, le=1000.0, description="sharpness of the gate's softmax")
    lambda_m: float = Field(
        0.5, ge=0.0, le=10.0, description="weight of the own prompt's logits beside the mixture's"
    )
    gate_lr: float = Field(
        0.01,
        gt=0.0,
        le=10.0,
        description="learning rate of the gate; train.lr is the prompt's; train.schedule: both",
    )


class Gate(nn.Module):
    """Multi-head attention of an image over each class's experts; no 1/sqrt(d), no dropout.

    Args:
        seed: decides the initial values, the same for all clients.
        width: of queries, keys and values.
        heads: must divide the width.
        beta: factor of the scores in the softmax.
    """

    def __init__(self, seed: int, width: int, heads: int, beta: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            new_linear(seed, f"gate.{x}", width, width, "uniform", bias="uniform") for x in "qkvo"
        )
        self.heads = heads
        self.beta = beta

    def forward(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the experts for every image and class.

        Args:
            query: pooled image features [B, g].
            keys: pooled text features of E experts [E, C, g].

        Returns:
            Output o [B, C, g] and weights [B, C, heads, E] that sum to 1 over E.
        """
        queries, known, values = (
            layer(x).unflatten(-1, (self.heads, -1))
            for layer, x in ((self.q, query), (self.k, keys), (self.v, keys))
        )
        weights = (self.beta * torch.einsum("bhd,echd->bche", queries, known)).softmax(dim=-1)
        mixed: Tensor = self.o(torch.einsum("bche,echd->bchd", weights, values).flatten(2))
        return mixed, weights


class PFedMoAP(PromptMethod):
    """Mixture of prompt experts (Mixture of Experts Made Personalized, ICLR 2025):

        logit_c = lambda_m tau <n(z), n(t_c0)> + tau <q, o_c>,  q = S(n(z)),  k_ce = S(n(t_ce)),
        o_c = W_o concat_h sum_e w_che (W_v k_ce)_h,
        w_che = softmax_e(beta (W_q q)_h . (W_k k_ce)_h),  L = CE(logits, y)

    Expert 0 is the client's own prompt, experts e > 0 are constant copies of other clients'. S
    keeps every (d_e / gate_dim)-th coordinate of the normalised features. Without other experts,
    as when a client takes part for the first time, logits are METHODS eq. (0).

    The prompt is averaged, the gate stays. A round starts from the averaged prompt as expert 0;
    inference uses the prompt that the client itself trained last, and the averaged one if it has
    trained none. The server keeps every client's newest prompt and chooses among those that were
    there when the round began. A cosine schedule lowers the rates of prompt and gate alike.

    Privacy: clients receive the trained prompts of single other clients, unaveraged, although
    without their names. Who must not see another's prompt must not use this method.
    """

    Config = PFedMoAPConfig
    keeps_uploads = True

    def __init__(self, config: PFedMoAPConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.config = config
        width, joint = config.gate_dim, backbone.embed_dim
        if joint % width:
            raise ConfigError(
                f"method.gate_dim = {width}: must divide {joint}, the joint dimension of "
                f"{backbone.name}"
            )
        if width % config.gate_heads:
            raise ConfigError(
                f"method.gate_heads = {config.gate_heads}: must divide method.gate_dim = {width}"
            )
        self.ctx = new_context(seed, "ctx", config.context_length, backbone.text_width)
        self.gate = Gate(seed, width, config.gate_heads, config.beta)
        self.stride = joint // width
        self._own: Tensor | None = None
        self._experts: Tensor | None = None
        # Features of the other clients' prompts by class list, since they came.
        self._encoded: dict[Classes, Tensor] = {}

    def shared(self) -> dict[str, nn.Parameter]:
        """The prompt [m, d_t]."""
        return self.named("ctx")

    def private(self) -> dict[str, nn.Parameter]:
        """The gate."""
        return self.named("gate")

    def learning_rate(self, name: str, lr: float) -> float:
        """`gate_lr` for the gate, `lr` for the prompt."""
        return self.config.gate_lr if name.startswith("gate.") else lr

    def payloads(
        self, clients: Sequence[str], uploads: Mapping[str, Tensors], seed: int
    ) -> dict[str, Tensors]:
        """Other clients' prompts under "experts" [1 to E - 1, m, d_t], nearest first.

        Clients that have never uploaded are sent none, whatever the selection.
        """
        pool = {client: upload["ctx"] for client, upload in uploads.items()}
        order = expert_order(pool, seed)
        found: dict[str, Tensors] = {}
        for client in sorted(set(clients) & set(pool)):
            chosen = select_experts(client, pool, self.config.experts, self.config.selection, order)
            if chosen:
                found[client] = {"experts": np.stack([pool[name] for name in chosen])}
        return found

    def begin(self, payload: Tensors, upload: Tensors) -> None:
        """Take the experts of this round and the own prompt of the last; forget older ones."""
        if payload:
            most, (length, width) = self.config.experts - 1, self.ctx.shape
            shapes = {name: value.shape for name, value in payload.items()}
            count, *rest = shapes.get("experts") or (0,)
            if set(shapes) != {"experts"} or not 1 <= count <= most or rest != [length, width]:
                raise RunError(
                    f"the server sent {shapes}, expected experts of shape (1 to {most}, {length}, "
                    f"{width})"
                )
        self._own = self._constant(upload.get("ctx"))
        self._experts = self._constant(payload.get("experts"))
        self._encoded = {}

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [E, C, d_e] for inference, the client's own prompt first."""
        return self._text(self.ctx if self._own is None else self._own, classes)

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] for text features [E, C, d_e]; eq. (0) if E is 1."""
        features = unit(self.backbone.image_features(images))
        own = self.backbone.logits(features, text[0])
        if len(text) == 1:
            return own
        with torch.autocast(features.device.type, enabled=False):
            query = self.pool(features)
            mixed, _ = self.gate(query, self.pool(text))
            mixture = self.backbone.temperature * torch.einsum("bg,bcg->bc", query, mixed)
        return self.config.lambda_m * own + mixture

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """Cross-entropy of the logits, with the received prompt as expert 0."""
        logits = self.scores(images, self._text(self.ctx, classes), classes)
        return {"loss": F.cross_entropy(logits, labels)}

    def pool(self, features: Tensor) -> Tensor:
        """S: every (d_e / gate_dim)-th coordinate, [..., d_e] -> [..., gate_dim]."""
        return features[..., :: self.stride]

    def _text(self, own: Tensor, classes: Classes) -> Tensor:
        """Features [E, C, d_e]; a gradient reaches the first expert only."""
        first = self.features(classes, own).unsqueeze(0)
        if self._experts is None:
            return first
        return torch.cat([first, self._constant_features(self._experts, classes)])

    def _constant_features(self, experts: Tensor, classes: Classes) -> Tensor:
        """Features [E - 1, C, d_e] of the other clients' prompts, once per class list."""
        if classes not in self._encoded:
            with torch.no_grad():
                features = [self.features(classes, context) for context in experts]
            self._encoded[classes] = torch.stack(features)
        return self._encoded[classes]

    def _constant(self, value: FloatArray | None) -> Tensor | None:
        if value is None:
            return None
        return torch.from_numpy(np.array(value, dtype=np.float32)).to(self.ctx.device)


def select_experts(
    client: str,
    pool: Mapping[str, FloatArray],
    experts: int,
    selection: Selection,
    order: Sequence[str],
) -> list[str]:
    """Whose prompts a client is sent: at most `experts` - 1 names, never its own.

    Args:
        client: the client that is sent prompts.
        pool: newest prompt [m, d_t] of every client that has uploaded one.
        experts: E; all others are chosen if no more than E clients have uploaded.
        selection: "nearest" (L2 distance of the prompts, ties by name) or "random".
        order: names, for "random" and for a client that has no prompt to measure from.

    Returns:
        Names of clients, best first.
    """
    others = [name for name in order if name in pool and name != client]
    if selection == "nearest" and client in pool:
        own = pool[client].astype(np.float64)
        others = sorted(pool.keys() - {client}, key=lambda n: (np.linalg.norm(pool[n] - own), n))
    return others[: experts - 1]


def expert_order(clients: Iterable[str], seed: int) -> list[str]:
    """Clients in a random order drawn once: a newcomer never changes the order of the others."""
    return sorted(clients, key=lambda name: derive_seed(seed, "experts", name))
