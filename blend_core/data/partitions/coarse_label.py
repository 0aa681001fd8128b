"""Clients of one coarse label share its fine labels evenly (PROTOCOL 3c, iid-label100)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blend_core.data.fewshot import items_by_class
from blend_core.data.partitions.dirichlet import Split, cut
from blend_core.errors import ConfigError
from blend_core.randomness import numpy_generator

__all__ = ["coarse_label"]


def coarse_label(
    train_labels: Sequence[int],
    test_labels: Sequence[int],
    coarse: Sequence[int],
    clients: int,
    seed: int,
) -> list[Split]:
    """Deal every coarse label to clients of its own, an equal slice of each fine label to each.

    Args:
        train_labels: the fine label of every training item.
        test_labels: the fine label of every test item.
        coarse: the coarse label of every fine label.
        clients: a multiple of the number of coarse labels; 100 and 20 in the papers' code.
        seed: the partition seed.

    Returns:
        Per client, positions in `train_labels` and in `test_labels`; client
        c x (clients / coarse labels) + j is the j-th of coarse label c.

    Raises:
        ConfigError: `clients` is no such multiple.
    """
    groups = sorted(set(coarse))
    if clients % len(groups):
        raise ConfigError(
            f"clients = {clients}: data.partition coarse-label needs a multiple of the "
            f"{len(groups)} coarse labels"
        )
    each = clients // len(groups)
    generator = numpy_generator(seed, "partition", "coarse-label")
    parts: list[Split] = [([], []) for _ in range(clients)]
    for which, labels in enumerate((train_labels, test_labels)):
        for label, items in sorted(items_by_class(labels).items()):
            first = groups.index(coarse[label]) * each
            for j, piece in enumerate(cut(items, np.full(each, 1 / each), generator)):
                parts[first + j][which].extend(piece)
    return parts
