"""Few-shot sampling and the base/new split (PROTOCOL 2) as pure functions of labels and seed.

The order is: few-shot over all classes, then the base/new filter, then the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blend_core.randomness import numpy_generator

__all__ = ["BaseNew", "few_shot", "items_by_class", "split_base_new"]


def items_by_class(labels: Sequence[int]) -> dict[int, list[int]]:
    """Positions of each label's items, ascending; classes in order of first appearance."""
    items: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        items.setdefault(label, []).append(position)
    return items


def few_shot(labels: Sequence[int], shots: int, seed: int) -> list[int]:
    """Draw `shots` items of every class without replacement.

    Each class has a stream of its own, so that the draw of one class does not depend on which
    other classes there are. A class with no more than `shots` items gives all it has, in their
    order; nothing is repeated.

    Args:
        labels: the class of every item.
        shots: items per class over the whole federation, 1 or more.
        seed: the few-shot seed, 0 or more.

    Returns:
        Positions in `labels`: classes in order of first appearance, items in order of the draw.

    Raises:
        ValueError: `shots` is below 1.
    """
    if shots < 1:
        raise ValueError(f"shots must be 1 or more, not {shots}")
    chosen: list[int] = []
    for label, items in items_by_class(labels).items():
        if len(items) <= shots:
            chosen += items
            continue
        generator = numpy_generator(seed, "few-shot", "train", label)
        chosen += generator.choice(items, size=shots, replace=False).tolist()
    return chosen


@dataclass(frozen=True)
class BaseNew:
    """The labels of the base and of the new classes, ascending."""

    base: tuple[int, ...]
    new: tuple[int, ...]


def split_base_new(labels: Sequence[int]) -> BaseNew:
    """Base classes are the first ceil(n/2) of the n distinct labels in sorted order (PROTOCOL 2).

    Args:
        labels: of all classes; repeated ones count once. The same halves then serve training and
            test.
    """
    distinct = sorted(set(labels))
    half = (len(distinct) + 1) // 2
    return BaseNew(tuple(distinct[:half]), tuple(distinct[half:]))
