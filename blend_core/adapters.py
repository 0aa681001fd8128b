"""Bottleneck adapters, and the places of a transformer block where an adapter may add.

Source: METHODS section 10.1, eq. (2); gradient scaling as in section 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from blend_core.errors import ConfigError
from blend_core.randomness import torch_generator

# How weights start: Kaiming-normal by fan in or out, uniform, or zero.
Init = Literal["in", "out", "uniform", "zero"]
Activation = Callable[[Tensor], Tensor]


class ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Return x [...] unchanged and remember the factor."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Multiply the gradient [...] by the factor."""
        return gradients[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x [...]; multiply the gradient that flows back through it by `factor`."""
    scaled: Tensor = ScaleGradient.apply(x, factor)
    return scaled


def new_linear(
    seed: int,
    name: str,
    inputs: int,
    outputs: int,
    init: Init,
    bias: Literal["zero", "uniform", "none"] = "zero",
) -> nn.Linear:
    """A linear layer [inputs] -> [outputs]; the draw depends on (seed, name) alone.

    Weights: "in" and "out" are Kaiming-normal with ReLU gain, std = sqrt(2 / inputs) and
    sqrt(2 / outputs); "uniform" is +-1/sqrt(inputs), as torch's own layers start; "zero" is 0.
    Bias: 0, uniform in +-1/sqrt(inputs), or none.
    """
    layer = nn.Linear(inputs, outputs, bias=bias != "none", device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        draws = torch_generator(seed, "init", name)
        if init == "zero":
            layer.weight.zero_()
        elif init == "uniform":
            layer.weight.uniform_(-bound, bound, generator=draws)
        else:
            std = math.sqrt(2 / (inputs if init == "in" else outputs))
            layer.weight.normal_(0.0, std, generator=draws)
        if bias == "zero":
            layer.bias.zero_()
        elif bias == "uniform":
            layer.bias.uniform_(-bound, bound, generator=draws)
    return layer


def require_rank(rank: int, widths: Mapping[str, int]) -> None:
    """Raise `ConfigError` if a rank (`method.rank`) exceeds the width of a tower (by name)."""
    tower = min(widths, key=widths.__getitem__)
    if rank > widths[tower]:
        raise ConfigError(
            f"method.rank = {rank}: the {tower} tower is {widths[tower]} wide; choose 1 to "
            f"{widths[tower]}"
        )


def dropout(x: Tensor, rate: float, draws: torch.Generator | None) -> Tensor:
    """Set entries of x [...] to 0 with probability `rate`, divide the others by 1 - rate.

    Without a generator, as in evaluation, x is returned. Draws are float32 on the generator's
    device (the CPU), so the mask depends neither on the precision nor on the model's device.
    """
    if draws is None or rate == 0:
        return x
    kept = torch.rand(x.shape, generator=draws, device=draws.device) >= rate
    return x * kept.to(x.device) / (1 - rate)


class BlockAdapter:
    """What may be added inside one frozen transformer block; by default nothing.

    The tower calls each hook with x [B, T, d] (T = 1 in a last block that is computed for the
    pooled token alone) and adds what comes back.

    Attributes:
        draws: the generator that the hooks draw from, if they do; the tower winds it back when
            it computes a block again.
    """

    draws: torch.Generator | None = None

    def to_attention(self, normed: Tensor, query_input: Tensor) -> tuple[Tensor, ...] | None:
        """What is added to queries, keys and values.

        Args:
            normed: LN1 of the block input [B, T, d], from which keys and values come.
            query_input: the tokens of it that ask [B, T or 1, d].

        Returns:
            Three tensors: like `query_input`, `normed` and `normed`; or None.
        """
        return None

    def to_mlp(self, hidden: Tensor) -> Tensor | None:
        """What is added beside the MLP, given the state after attention [B, T, d]."""
        return None

    def to_output(self, block_input: Tensor, normed: Tensor) -> Tensor | None:
        """What is added to the block's output, given its input and LN1 of it, both [B, T, d]."""
        return None


class Bottleneck(nn.Module):
    """up(act(down(x))): width -> rank -> width; act is ReLU unless another is given.

    With biases it has A(d, r) = 2dr + r + d parameters.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        width: int,
        rank: int,
        down: Init = "out",
        up: Init = "out",
        bias: bool = True,
        activation: Activation = torch.relu,
    ) -> None:
        super().__init__()
        biases: Literal["zero", "none"] = "zero" if bias else "none"
        self.down = new_linear(seed, f"{name}.down", width, rank, down, biases)
        self.up = new_linear(seed, f"{name}.up", rank, width, up, biases)
        self.activation = activation

    def forward(self, x: Tensor, between: Activation | None = None) -> Tensor:
        """Map x [..., width] to [..., width]; `between` acts on the hidden [..., rank]."""
        hidden = self.activation(self.down(x))
        out: Tensor = self.up(hidden if between is None else between(hidden))
        return out


class ParallelAdapter(Bottleneck, BlockAdapter):
    """s * Bottleneck(LN1(x)) (tap "ln1") or s * Bottleneck(x) (tap "raw"), eq. (2).

    With gradient scaling the parameters receive 1/s times their true gradient, as if the branch
    had unit scale, while the gradient passed to the input stays the true one.

    Args:
        seed, name: decide the initial values.
        width, rank: of the bottleneck.
        scale: s, above 0.
        tap: what the branch sees.
        gradient_scaling: whether parameters see the branch at unit scale.
        bias: biases in both layers.
        activation: behind the down layer.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        width: int,
        rank: int,
        scale: float,
        tap: Literal["ln1", "raw"] = "ln1",
        gradient_scaling: bool = True,
        bias: bool = True,
        activation: Activation = torch.relu,
    ) -> None:
        super().__init__(seed, name, width, rank, bias=bias, activation=activation)
        self.scale = scale
        self.tap = tap
        self.gradient_scaling = gradient_scaling

    def to_output(
        self, block_input: Tensor, normed: Tensor, between: Activation | None = None
    ) -> Tensor:
        """s times the branch, whose hidden state may pass through `between`; [B, T, width]."""
        x = normed if self.tap == "ln1" else block_input
        if not self.gradient_scaling:
            return self.scale * self.forward(x, between)
        out = self.forward(scale_gradient(x, self.scale), between)
        return self.scale * scale_gradient(out, 1.0 / self.scale)


def per_block(
    adapters: Mapping[str, nn.Module] | Mapping[str, BlockAdapter], total: int
) -> list[BlockAdapter | None]:
    """One entry per block of a tower: its adapter, found by the block's number ("1" first)."""
    found = [adapters.get(str(number)) for number in range(1, total + 1)]
    return [cast(BlockAdapter | None, adapter) for adapter in found]


@dataclass(frozen=True)
class CoupledAdapter(BlockAdapter):
    """A parallel adapter with a middle layer that it shares with the other tower (METHODS 8).

    Attributes:
        adapter: of one block of one tower.
        middle: layer rank -> rank.
        activation: behind the middle layer; None: none.
    """

    adapter: ParallelAdapter
    middle: nn.Module
    activation: Activation | None = torch.relu

    def to_output(self, block_input: Tensor, normed: Tensor) -> Tensor:
        """s times the branch through the middle layer, [B, T, width]."""
        return self.adapter.to_output(block_input, normed, self._through_middle)

    def _through_middle(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.middle(hidden)
        return out if self.activation is None else self.activation(out)
