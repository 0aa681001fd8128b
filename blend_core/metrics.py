"""From raw counts to the two papers' metrics (PROTOCOL section 4)."""

from __future__ import annotations

import statistics
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
# So many evaluations are averaged beside the last one, as peers do on CIFAR and domain sets.
LAST = 5
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
    is None.

    Args:
        counts: client name -> group ("local", "base", "novel") -> [right, total].

    Returns:
        The `METRICS` in percent; "weighted": the same with every image counting alike instead of
        every client; "std": their population standard deviation over clients, in points.
    """
    clients = [client_metrics(client) for _, client in sorted(counts.items())]
    means: list[float | None] = []
    spread: dict[str, float | None] = {}
    for name in METRICS:
        values = [value for client in clients if (value := client[name]) is not None]
        spread[name] = statistics.pstdev(values) if values else None
        if name in ("local", "base", "novel"):
            means.append(sum(values) / len(values) if values else None)
    return {**_combine(*means), "weighted": _combine(*pooled(counts)), "std": spread}


def zero_shot_as_published(
    counts: Mapping[str, Mapping[str, Sequence[int]]],
) -> dict[str, float | None]:
    """Zero-shot as BLEND's released code measures it (PROTOCOL 4.1): one model, all images.

    Returns:
        "per": accuracy over all base test images, not only those of the clients' classes;
        "gen": over all new ones; "hmean" of both; in percent.
    """
    _, base, novel = pooled(counts)
    return {"per": base, "gen": novel, "hmean": harmonic_mean([base, novel])}


def pooled(
    counts: Mapping[str, Mapping[str, Sequence[int]]],
) -> tuple[float | None, float | None, float | None]:
    """Local, base and novel accuracy over the images of all clients, in percent."""
    local, base, novel = (
        percent([sum(client[group][i] for client in counts.values()) for i in (0, 1)])
        for group in ("local", "base", "novel")
    )
    return local, base, novel


def mean_of_last(evaluations: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of each metric over the last five evaluations (PROTOCOL 4.2).

    Args:
        evaluations: after how many rounds -> `federation_metrics`; only those of all clients.

    Returns:
        The `METRICS` in percent, "after_rounds", and "reason": why all are None; else None.
    """
    rounds = sorted(evaluations)[-LAST:]
    reason = None
    if len(rounds) < LAST:
        reason = f"{len(rounds)} of {LAST} evaluations of all clients"
        means: dict[str, float | None] = dict.fromkeys(METRICS)
    else:
        means = {name: _mean([evaluations[r][name] for r in rounds]) for name in METRICS}
    return {**means, "after_rounds": rounds, "reason": reason}


def best_on_test(
    evaluations: Mapping[int, Mapping[str, Any]], last: Mapping[str, Any]
) -> dict[str, Any]:
    """The evaluation with the highest Local, ties: the latest (PROTOCOL 4.2, paper mode).

    It is chosen on the images that it is measured on, so it says too much.

    Args:
        evaluations: after how many rounds -> `federation_metrics`; only those of all clients.
        last: metrics of the last round.

    Returns:
        The `METRICS` in percent, "model_after_round", "chosen_from": the number of evaluations,
        and "optimism": by metric, how far it is above `last`, in points. None where unknown.
    """
    known = [r for r, found in evaluations.items() if found["local"] is not None]
    best = max(known, key=lambda r: (evaluations[r]["local"], r), default=None)
    metrics: dict[str, float | None] = {
        name: None if best is None else evaluations[best][name] for name in METRICS
    }
    optimism = {
        name: None if value is None or last[name] is None else value - last[name]
        for name, value in metrics.items()
    }
    return {
        **metrics,
        "model_after_round": best,
        "chosen_from": len(known),
        "optimism": optimism,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _combine(
    local: float | None, base: float | None, novel: float | None
) -> dict[str, float | None]:
    measured = {"per": local, "gen": novel, "local": local, "base": base, "novel": novel}
    means = {
        name: harmonic_mean([measured[part] for part in parts]) for name, parts in HARMONIC.items()
    }
    return {name: {**measured, **means}[name] for name in METRICS}
