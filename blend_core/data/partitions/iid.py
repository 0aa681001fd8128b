"""Images of all clients from one distribution (PROTOCOL 3e)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blend_core.data.fewshot import items_by_class
from blend_core.data.partitions.dirichlet import Split
from blend_core.errors import ConfigError
from blend_core.randomness import numpy_generator

__all__ = ["iid_few_shot", "iid_full", "iid_overlapping"]


def iid_full(train: int, test: int, clients: int, seed: int) -> list[Split]:
    """Cut one permutation of the training and one of the test items into near-equal parts.

    Args:
        train: number of training items.
        test: number of test items.
        clients: number of clients, 1 or more.
        seed: the partition seed.

    Raises:
        ConfigError: there are fewer training items than clients.
    """
    _require(train, clients)
    generator = numpy_generator(seed, "partition", "iid")
    cuts = [np.array_split(generator.permutation(count), clients) for count in (train, test)]
    return [(a.tolist(), b.tolist()) for a, b in zip(*cuts, strict=True)]


def iid_few_shot(labels: Sequence[int], clients: int, seed: int) -> list[list[int]]:
    """Deal the shots of every class evenly, without overlap.

    Where a class does not divide, the next class begins with the client that comes next, so that
    clients' sizes differ by one at most.

    Args:
        labels: the class of every training item.
        clients: number of clients, 1 or more.
        seed: the partition seed.

    Raises:
        ConfigError: there are fewer items than clients.
    """
    _require(len(labels), clients)
    generator = numpy_generator(seed, "partition", "iid")
    parts: list[list[int]] = [[] for _ in range(clients)]
    client = 0
    for items in items_by_class(labels).values():
        for item in generator.permutation(items).tolist():
            parts[client].append(item)
            client = (client + 1) % clients
    return parts


def iid_overlapping(labels: Sequence[int], clients: int, shots: int, seed: int) -> list[list[int]]:
    """Every client draws its own `shots` of every class; clients overlap, as in peers' code.

    All clients together have `clients` times the data of the other rules.

    Args:
        labels: the class of every training item, before any few-shot draw.
        clients: number of clients, 1 or more.
        shots: items per class and client.
        seed: the partition seed.
    """
    items = [np.asarray(found) for found in items_by_class(labels).values()]
    parts: list[list[int]] = []
    for client in range(clients):
        generator = numpy_generator(seed, "partition", "iid-overlapping", client)
        drawn = [generator.permutation(found)[:shots] for found in items]
        parts.append(np.concatenate(drawn).tolist())
    return parts


def _require(items: int, clients: int) -> None:
    if items < clients:
        raise ConfigError(
            f"clients = {clients}: {items} training images are not one for every client; set "
            "fewer clients or more shots"
        )
