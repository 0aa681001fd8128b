"""What rounds with Gaussian noise cost: epsilon at a delta, exactly.

k rounds with noise multiplier z are together one Gaussian mechanism with multiplier z / sqrt(k)
(Dong, Roth, Su 2022, corollary 2 of theorem 3), and of one Gaussian mechanism the relation between
epsilon and delta is known in closed form (Balle, Wang 2018, theorem 8). A Renyi accountant only
bounds the same number from above. No amplification by sampling is counted: who takes part follows
from the run's seed, which every site knows, so only the rounds a client was asked in count.
"""

from __future__ import annotations

import math


def epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """The smallest epsilon for which the rounds are (epsilon, delta)-differentially private.

    Args:
        noise_multiplier: deviation of the noise relative to the sensitivity (L2), above 0.
        rounds: rounds with the client's data, from 0.
        delta: in [1e-10, 1).

    Returns:
        epsilon >= 0, rounded up in the seventh digit.
    """
    if rounds == 0 or delta_of(noise_multiplier, rounds, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(noise_multiplier, rounds, high) > delta:
        low, high = high, 2.0 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        if delta_of(noise_multiplier, rounds, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def delta_of(noise_multiplier: float, rounds: int, epsilon: float) -> float:
    """The smallest delta at an epsilon (Balle, Wang 2018, equation 6).

    With mu = sqrt(rounds) / z: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).
    """
    from scipy.special import log_ndtr

    mu = math.sqrt(rounds) / noise_multiplier
    # In logarithms: e^epsilon alone overflows.
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(min(second - first, 0.0))
