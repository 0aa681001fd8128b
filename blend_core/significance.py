"""Is the difference between two methods more than chance? Pure arithmetic (PROTOCOL 4.5)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEEDS_TWO_SEEDS = "needs two seeds"
DO_NOT_VARY = "differences do not vary"

# Below this seed count a p-value is shown, but supports no claim.
SEEDS_FOR_A_CLAIM = 5

# A spread this small, relative to the values, is rounding of floating-point numbers.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PairedTest:
    """Two-sided paired t-test of the differences a - b at equal seeds.

    Attributes:
        n: number of pairs.
        mean: mean difference, in the unit of the values; None without a pair.
        interval: 95 % confidence interval of the mean difference.
        t: mean / (sd / sqrt(n)), sd with ddof 1; n - 1 degrees of freedom.
        p: two-sided p-value, above 0 and at most 1.
        reason: why interval, t and p are None; None when they are not.
    """

    n: int
    mean: float | None
    interval: tuple[float, float] | None = None
    t: float | None = None
    p: float | None = None
    reason: str | None = None


def paired_test(a: Mapping[int, float], b: Mapping[int, float]) -> PairedTest:
    """Test whether `a` differs from `b`; only seeds that both have count.

    Args:
        a: seed -> value of one method, finite.
        b: seed -> value of the other.

    Returns:
        The test; with fewer than two pairs, or differences that do not vary, p is None and the
        reason is given. It is never 0 or NaN for lack of spread.
    """
    from scipy.special import stdtr, stdtrit  # Student's t; the import takes a third of a second.

    seeds = sorted(a.keys() & b.keys())
    n = len(seeds)
    differences = [a[seed] - b[seed] for seed in seeds]
    mean = statistics.fmean(differences) if n else None
    if mean is None or n < 2:
        return PairedTest(n, mean, reason=NEEDS_TWO_SEEDS)
    sd = statistics.stdev(differences)
    largest = max(abs(values[seed]) for values in (a, b) for seed in seeds)
    if sd <= _ROUNDING * largest:
        return PairedTest(n, mean, reason=DO_NOT_VARY)
    error = sd / math.sqrt(n)
    t = mean / error
    reach = float(stdtrit(n - 1, 0.975)) * error
    p = 2 * float(stdtr(n - 1, -abs(t)))
    return PairedTest(n, mean, (mean - reach, mean + reach), t, p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment of a family of p-values.

    The i-th smallest of m is multiplied by m - i + 1, made monotone from the smallest up, and
    capped at 1. A None is no test: it stays None and does not count in m.

    Returns:
        Adjusted p-values in the order given.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    reached = 0.0
    for rank, (p, place) in enumerate(known):
        reached = max(reached, (len(known) - rank) * p)
        adjusted[place] = min(reached, 1.0)
    return adjusted
