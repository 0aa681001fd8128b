"""Bottleneck adapters: up(ReLU(down(.))), parallel to a transformer block, scaled.

Source: METHODS section 10.1, eq. (2); gradient scaling as in section 8.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blend_core.randomness import torch_generator

Fan = Literal["in", "out", "zero"]


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


def kaiming_linear(
    seed: int, name: str, inputs: int, outputs: int, fan: Fan, bias: bool = True
) -> nn.Linear:
    """A linear layer [inputs] -> [outputs], Kaiming-normal with ReLU gain, bias 0.

    std = sqrt(2 / fan); "zero" sets the weights to 0. The draw depends on (seed, name) alone.
    """
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        if fan == "zero":
            layer.weight.zero_()
        else:
            std = math.sqrt(2 / (inputs if fan == "in" else outputs))
            layer.weight.normal_(0.0, std, generator=torch_generator(seed, "init", name))
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


class Bottleneck(nn.Module):
    """up(ReLU(down(x))): width -> rank -> width.

    With biases it has A(d, r) = 2dr + r + d parameters.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        width: int,
        rank: int,
        down: Fan = "out",
        up: Fan = "out",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.down = kaiming_linear(seed, f"{name}.down", width, rank, down, bias)
        self.up = kaiming_linear(seed, f"{name}.up", rank, width, up, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to [..., width]."""
        out: Tensor = self.up(torch.relu(self.down(x)))
        return out


class ParallelAdapter(Bottleneck):
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
    ) -> None:
        super().__init__(seed, name, width, rank, bias=bias)
        self.scale = scale
        self.tap = tap
        self.gradient_scaling = gradient_scaling

    def add_to_block(self, block_input: Tensor, normed: Tensor) -> Tensor:
        """Return what is added to the block's output; all [B, T, width]."""
        x = normed if self.tap == "ln1" else block_input
        if not self.gradient_scaling:
            return self.scale * self.forward(x)
        out = self.forward(scale_gradient(x, self.scale))
        return self.scale * scale_gradient(out, 1.0 / self.scale)
