"""Who gets which training image: Dirichlet with a preferred client per class (PROTOCOL 3a).

A partition is a pure function of the ordered labels, the parameters and the seed. The two
generators and the order of their draws are part of the rule: they reproduce the partition of the
papers' released code, so nothing may be drawn elsewhere or in another order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from blend_core.data.fewshot import items_by_class
from blend_core.errors import ConfigError

__all__ = ["dirichlet_preferred"]


def dirichlet_preferred(
    labels: Sequence[int], clients: int, shots: int, alpha: float, boost: float, seed: int
) -> list[list[int]]:
    """Deal the items of every class to clients in Dirichlet shares.

    The k-th class prefers client k mod `clients`. A client left without items takes one from the
    client that has most.

    Args:
        labels: the class of every item, few-shot and base classes only. The order matters.
        clients: number of clients N, 1 or more.
        shots: items dealt per class; a class with more is sampled, one with fewer runs short.
        alpha: concentration for every client, above 0; the smaller, the fewer holders a class has.
        boost: added for the preferred client, 0 or more. The papers' table has 1; a plain
            Dirichlet has 0.
        seed: of both generators; 1 in the papers' code.

    Returns:
        Per client, positions in `labels`, in the order they were dealt; none is empty, and no
        position occurs twice.

    Raises:
        ConfigError: a client has no item and no other client has two.
    """
    generator, shuffler = np.random.default_rng(seed), random.Random(seed)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for rank, items in enumerate(items_by_class(labels).values()):
        concentration = np.full(clients, alpha)
        concentration[rank % clients] += boost
        shares = generator.dirichlet(concentration)
        counts = generator.multinomial(shots, shares).tolist()
        pool = shuffler.sample(items, shots) if len(items) > shots else list(items)
        shuffler.shuffle(pool)
        dealt = 0
        for client in generator.permutation(clients).tolist():
            part = pool[dealt : dealt + counts[client]]
            dealt += len(part)
            parts[client] += part
    _repair(parts, shuffler)
    return parts


def _repair(parts: list[list[int]], shuffler: random.Random) -> None:
    """Give each empty client, in ascending order, one item of the client that has most."""
    for client, part in enumerate(parts):
        if part:
            continue
        donor = max(parts, key=len)  # the first of the largest: the smallest client number
        if len(donor) < 2:
            raise ConfigError(
                f"clients = {len(parts)}: client {client} gets no training image and no other has "
                f"two ({sum(map(len, parts))} images in all); set fewer clients or more shots"
            )
        part.append(donor.pop(shuffler.randrange(len(donor))))
