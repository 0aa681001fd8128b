"""Entropic optimal transport between few columns and many rows (METHODS section 4).

One scaling loop for a whole batch of problems, in the log domain and in float64: a linear
float32 solver overflows at epsilon 0.01, and a float32 one in the log domain stops at another
iteration, because the stop test is absolute on column scalings that reach 1e8.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blend_core.errors import RunError

Solver = Literal["cot", "sinkhorn"]


class Plan(NamedTuple):
    """What the solver found.

    Attributes:
        plan: mass moved from every row to every column, float32 [..., M, N].
        iterations: that were needed; `max_iterations` if the stop test was never met.
    """

    plan: Tensor
    iterations: int


@torch.no_grad()
def transport_plan(
    cost: Tensor,
    epsilon: float,
    mass: float = 1.0,
    solver: Solver = "cot",
    threshold: float = 1e-3,
    max_iterations: int = 100,
) -> Plan:
    """Plans diag(u) K diag(v) of a batch of problems, with K = exp(-cost / epsilon).

    From u = 1, v = 1, with a = 1/M and b = mass/N ("sinkhorn": b = 1/N), one iteration is

        u_m = min(a / (K v)_m, 1)   ("sinkhorn" without the min),   v_j = b / (K^T u)_j.

    "cot" moves `mass` in all: every column has exactly b, a row at most a once converged.
    "sinkhorn" moves 1 and fills every row; `mass` does not count.

    It stops when the mean of |v - v_previous| ("sinkhorn": of u) over all problems of the batch
    falls below the threshold: they stop together, so a plan depends on the rest of the batch.
    Time and memory grow with the size of `cost`, of which a few float64 copies are alive at once.

    Args:
        cost: [..., M, N]; no gradient flows through the solver.
        epsilon: entropic regularisation, above 0, in units of the cost.
        mass: gamma_ot, total mass that "cot" moves, in (0, 1].
        solver: rows capped (cot) or exact (sinkhorn).
        threshold: of the stop test, on the scale of the scalings themselves.
        max_iterations: at least 1.

    Raises:
        RunError: a plan is not finite; names the setting to change.
    """
    rows, columns = cost.shape[-2:]
    # [..., N, M]: the long sum runs over neighbours in memory.
    kernel = (-cost.double() / epsilon).transpose(-1, -2).contiguous()
    log_a = -math.log(rows)
    log_b = math.log((mass if solver == "cot" else 1.0) / columns)
    log_u = kernel.new_zeros(kernel[..., 0, :].shape)
    log_v = kernel.new_zeros(kernel[..., 0].shape)
    iterations, moving = 0, True
    while moving and iterations < max_iterations:
        iterations += 1
        before = log_v if solver == "cot" else log_u
        log_u = log_a - (kernel + log_v.unsqueeze(-1)).logsumexp(-2)
        if solver == "cot":
            log_u = log_u.clamp(max=0.0)
        log_v = log_b - (kernel + log_u.unsqueeze(-2)).logsumexp(-1)
        change = _log_mean_change(log_v if solver == "cot" else log_u, before)
        moving = not change < math.log(threshold)
    plan = (kernel + log_v.unsqueeze(-1) + log_u.unsqueeze(-2)).exp().transpose(-1, -2)
    if not torch.isfinite(plan).all():
        raise RunError(
            f"the transport plan is not finite; raise method.epsilon (now {epsilon})"
            if torch.isfinite(cost).all()
            else "the transport plan is not finite because the features are not; lower train.lr"
        )
    return Plan(plan.float(), iterations)


def _log_mean_change(now: Tensor, before: Tensor) -> Tensor:
    """log mean |exp(now) - exp(before)|, where the exponentials themselves may overflow."""
    change = torch.maximum(now, before) + torch.log(-torch.expm1(-(now - before).abs()))
    return change.flatten().logsumexp(0) - math.log(change.numel())
