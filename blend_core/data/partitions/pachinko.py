"""Pachinko allocation over coarse and fine labels (PROTOCOL 3c, labeldir100)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from blend_core.data.fewshot import items_by_class
from blend_core.data.partitions.dirichlet import Split
from blend_core.errors import ConfigError
from blend_core.randomness import numpy_generator

__all__ = ["pachinko"]

FINE_CONCENTRATION = 10.0


def pachinko(
    train_labels: Sequence[int],
    test_labels: Sequence[int],
    coarse: Sequence[int],
    clients: int,
    beta: float,
    seed: int,
) -> list[Split]:
    """Draw every client's images one by one: a coarse label, a fine label of it, an image.

    Training and test images are pooled and every client draws an equal number of them without
    replacement. A client's weights over the coarse labels that are left come from
    Dirichlet(beta), those over the fine labels of each from Dirichlet(10). What is exhausted is
    taken out and the weights are renormalised. How many of a client's images are test images is
    left to chance.

    Args:
        train_labels: the fine label of every training item.
        test_labels: the fine label of every test item.
        coarse: the coarse label of every fine label.
        clients: number of clients, 1 or more.
        beta: concentration over coarse labels, above 0.
        seed: the partition seed.

    Returns:
        Per client, positions in `train_labels` and in `test_labels`.

    Raises:
        ConfigError: there are fewer training images than clients.
    """
    pool = [*train_labels, *test_labels]
    each = len(pool) // clients
    if len(train_labels) < clients:
        raise ConfigError(
            f"clients = {clients}: {len(train_labels)} training images are not one for every "
            "client; set fewer clients"
        )
    generator = numpy_generator(seed, "partition", "pachinko")
    # Taking the last of a shuffled list is a uniform draw without replacement.
    left = {
        label: generator.permutation(items).tolist()
        for label, items in sorted(items_by_class(pool).items())
    }
    parts: list[Split] = []
    for _ in range(clients):
        fine: dict[int, _Weights] = {}
        for group in sorted({coarse[label] for label in left}):
            labels = [label for label in left if coarse[label] == group]
            fine[group] = _Weights(labels, FINE_CONCENTRATION, generator)
        groups = _Weights(list(fine), beta, generator)
        drawn = []
        for first, second in generator.random((each, 2)).tolist():
            group = groups.pick(first)
            label = fine[group].pick(second)
            drawn.append(left[label].pop())
            if not left[label]:
                del left[label]
                fine[group].remove(label)
                if not fine[group].names:
                    groups.remove(group)
        count = len(train_labels)
        parts.append(([i for i in drawn if i < count], [i - count for i in drawn if i >= count]))
    return [parts[i] for i in generator.permutation(clients).tolist()]


class _Weights:
    """Names with weights from a symmetric Dirichlet distribution."""

    def __init__(self, names: list[int], concentration: float, generator: np.random.Generator):
        self.names = names
        self._weights: list[float] = generator.dirichlet([concentration] * len(names)).tolist()
        self._cumulate()

    def pick(self, uniform: float) -> int:
        """The name at a point of [0, 1)."""
        at = bisect_right(self._ends, uniform * self._ends[-1])
        return self.names[min(at, len(self.names) - 1)]

    def remove(self, name: int) -> None:
        at = self.names.index(name)
        del self.names[at], self._weights[at]
        if self.names:
            self._cumulate()

    def _cumulate(self) -> None:
        if not sum(self._weights) > 0:  # What is left had shares too small to be told from 0.
            self._weights = [1.0] * len(self.names)
        self._ends = list(accumulate(self._weights))
