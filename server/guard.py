"""Is this reply acceptable? One question, one place, every reply of every engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from blend_core import __version__
from blend_core.messages import Reply

Shape = tuple[int, ...]


def refusal(
    reply: Reply,
    client: str,
    round: int,
    shapes: Mapping[str, Shape],
    private: Collection[str],
    max_images: int,
) -> str | None:
    """Why a reply to a train request must not enter the mean; None if it may.

    Args:
        reply: what came back.
        client: the client that was asked.
        round: the round it was asked for.
        shapes: exactly the shared tensors of the method, by name.
        private: names that must never leave a site.
        max_images: largest number of training images believed.
    """
    if reply.client != client:
        return f"it claims to come from {reply.client!r}, which was not asked here"
    if reply.version != __version__:
        return f"it runs version {reply.version!r}, the server {__version__}"
    if reply.kind != "train" or reply.round != round:
        return f"it answers {reply.kind} of round {reply.round}, asked was train of round {round}"
    leaked = sorted(set(reply.shared) & set(private))
    if leaked:
        return f"it carries private tensors: {', '.join(leaked[:3])}"
    missing, extra = (
        sorted(set(shapes) - set(reply.shared)),
        sorted(set(reply.shared) - set(shapes)),
    )
    if missing:
        return f"{len(missing)} shared tensors are missing, e.g. {missing[0]}"
    if extra:
        return f"{len(extra)} tensors are unknown, e.g. {extra[0]}"
    images = reply.train_images
    if not isinstance(images, int) or isinstance(images, bool) or not 1 <= images <= max_images:
        return f"its number of training images is {images!r}, allowed are 1 to {max_images}"
    for name, value in sorted(reply.shared.items()):
        if tuple(value.shape) != tuple(shapes[name]):
            return f"{name} has shape {tuple(value.shape)}, expected {tuple(shapes[name])}"
        if value.dtype != np.float32:
            return f"{name} has dtype {value.dtype}, expected float32"
        # A sum is finite only if every value is, and needs no temporary array.
        if not math.isfinite(float(value.sum(dtype=np.float64))):
            return f"{name} holds values that are not finite"
    return statistics_refusal(reply)


def statistics_refusal(reply: Reply, counts_needed: bool = False) -> str | None:
    """Why the statistics of a reply cannot be used; None if they can.

    Counts of right answers, where present (or needed), are [right, total] per group.
    """
    statistics = reply.statistics
    counts = statistics.get("counts")
    if counts is None and counts_needed:
        return "it holds no counts of right answers"
    if counts is not None:
        groups = ("local", "base", "novel")
        whole = isinstance(counts, dict) and sorted(counts) == sorted(groups)
        if not whole or not all(_is_count(counts[group]) for group in groups):
            return f"its counts of right answers are {str(counts)[:80]}"
    for key in ("train_span", "evaluate_span"):
        if key in statistics and not _is_span(statistics[key]):
            return f"its {key} is {str(statistics[key])[:80]}"
    if not isinstance(statistics.get("private_sha256", ""), str):
        return "its private_sha256 is not text"
    return None


def _is_count(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int for n in value):
        return False
    return bool(0 <= value[0] <= value[1])


def _is_span(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(time, int | float) and math.isfinite(time) for time in value)
