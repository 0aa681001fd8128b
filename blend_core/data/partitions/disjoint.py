"""Every class belongs to one client (PROTOCOL 3b, pFedMMA)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from blend_core.data.fewshot import items_by_class
from blend_core.errors import ConfigError

__all__ = ["disjoint"]


def disjoint(
    labels: Sequence[int],
    clients: int,
    shots: int | None,
    seed: int,
    blocks: Literal["balanced", "round"] = "balanced",
) -> list[list[int]]:
    """Shuffle the classes, then deal them to clients in consecutive blocks.

    Generator and order of draws are those of the released code, whose seed is 2023.

    Args:
        labels: the class of every training item, base classes only.
        clients: number of clients N, 1 or more.
        shots: items drawn of every class; None: all, in their order.
        seed: of the generator.
        blocks: "balanced": sizes of blocks differ by one at most, larger ones first. "round", as
            in the released code: round(classes / N) each, half to even, and the rest, however
            many, to the last client.

    Returns:
        Per client, positions in `labels`; none is empty.

    Raises:
        ConfigError: a client would get no class.
    """
    generator = random.Random(seed)
    items = items_by_class(labels)
    classes = sorted(items)
    generator.shuffle(classes)
    if blocks == "round":
        each = round(len(classes) / clients)
        sizes = [each] * (clients - 1) + [len(classes) - each * (clients - 1)]
    else:
        each, rest = divmod(len(classes), clients)
        sizes = [each + (client < rest) for client in range(clients)]
    if min(sizes) < 1:
        first = next(client for client, size in enumerate(sizes) if size < 1)
        raise ConfigError(
            f"data.partition disjoint, blocks {blocks}: {len(classes)} classes leave client "
            f"{first} of {clients} without one; set fewer clients"
        )
    ends = list(accumulate(sizes))
    parts: list[list[int]] = []
    for start, end in zip([0, *ends], ends, strict=False):
        own = set(classes[start:end])
        part: list[int] = []
        for label in filter(own.__contains__, items):  # in order of first appearance
            found = items[label]
            part += found if shots is None else generator.sample(found, min(shots, len(found)))
        parts.append(part)
    return parts
