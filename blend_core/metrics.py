"""From raw counts to the two papers' metrics (PROTOCOL section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Metrics of the two protocols; Per. and Local, Gen. and Novel are the same measurement.
METRIC_NAMES = {
    "per": "Per.",
    "gen": "Gen.",
    "hmean": "H-Mean",
    "local": "Local",
    "base": "Base",
    "novel": "Novel",
    "hm": "HM",
}
METRICS = tuple(METRIC_NAMES)
# What a harmonic mean is taken of.
HARMONIC = {"hmean": ("per", "gen"), "hm": ("local", "base", "novel")}
# Stands in every table where there is no value.
DASH = "-"


def percent(count: Sequence[int]) -> float | None:
    """[right, total] -> percent; None without images."""
    right, total = count
    return 100.0 * right / total if total else None


def harmonic_mean(values: Sequence[float | None]) -> float | None:
    """Harmonic mean of percentages; 0 if any is 0, None if any is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if any(value == 0 for value in known):
        return 0.0
    return len(known) / sum(1 / value for value in known)


def client_metrics(counts: Mapping[str, Sequence[int]]) -> dict[str, float | None]:
    """All metrics of one client, in percent."""
    return _combine(*(percent(counts[group]) for group in ("local", "base", "novel")))


def federation_metrics(counts: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Headline metrics: unweighted client means, then the harmonic means of these.

    Clients without test images in a group are left out of its mean; if none is left the metric
    is None. The image-weighted means stand beside, as "weighted".

    Args:
        counts: client name -> group ("local", "base", "novel") -> [right, total].
    """
    means: list[float | None] = []
    pooled: list[float | None] = []
    for group in ("local", "base", "novel"):
        rows = [client[group] for _, client in sorted(counts.items())]
        shares = [share for share in map(percent, rows) if share is not None]
        means.append(sum(shares) / len(shares) if shares else None)
        pooled.append(percent([sum(r[0] for r in rows), sum(r[1] for r in rows)]))
    return {**_combine(*means), "weighted": _combine(*pooled)}


def _combine(
    local: float | None, base: float | None, novel: float | None
) -> dict[str, float | None]:
    measured = {"per": local, "gen": novel, "local": local, "base": base, "novel": novel}
    means = {
        name: harmonic_mean([measured[part] for part in parts]) for name, parts in HARMONIC.items()
    }
    return {name: {**measured, **means}[name] for name in METRICS}
