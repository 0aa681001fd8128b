"""A fixed number of classes per client, in similar shares (PROTOCOL 3c, labeluni)."""

from __future__ import annotations

from collections.abc import Sequence

from blend_core.data.fewshot import items_by_class
from blend_core.data.partitions.dirichlet import Split, cut
from blend_core.errors import ConfigError
from blend_core.randomness import numpy_generator

__all__ = ["uniform_classes"]


def uniform_classes(
    train_labels: Sequence[int],
    test_labels: Sequence[int],
    clients: int,
    classes_per_client: int,
    seed: int,
    names: Sequence[str],
) -> list[Split]:
    """Give every client some classes, and every class to as many clients as any other, +-1.

    The holders of a class share it in proportion to draws from U(0.4, 0.6), alike for training
    and test.

    Args:
        train_labels: the class of every training item.
        test_labels: the class of every test item.
        clients: number of clients, 1 or more.
        classes_per_client: exactly so many.
        seed: the partition seed.
        names: class names by label, for messages.

    Returns:
        Per client, positions in `train_labels` and in `test_labels`.

    Raises:
        ConfigError: there are not so many classes, too few clients for all classes, or too few
            images of a class for its holders.
    """
    train, test = items_by_class(train_labels), items_by_class(test_labels)
    classes = sorted(train)
    what = f"data.partition uniform-classes: {clients} clients x {classes_per_client} classes"
    if classes_per_client > len(classes) or clients * classes_per_client < len(classes):
        raise ConfigError(
            f"{what} do not fit {len(classes)} classes: every client needs as many different "
            "ones, and every class a client"
        )
    generator = numpy_generator(seed, "partition", "uniform-classes")
    holders: dict[int, list[int]] = {label: [] for label in classes}
    for client in generator.permutation(clients).tolist():
        # The classes with the fewest holders; a new order of all breaks ties.
        order = [classes[i] for i in generator.permutation(len(classes)).tolist()]
        for label in sorted(order, key=lambda k: len(holders[k]))[:classes_per_client]:
            holders[label].append(client)
    parts: list[Split] = [([], []) for _ in range(clients)]
    for label, owners in holders.items():
        weight = generator.uniform(0.4, 0.6, len(owners))
        share = weight / weight.sum()
        for which, items in enumerate((train, test)):
            pieces = cut(items.get(label, []), share, generator)
            # Rounded down, a share of few images can be none: the client would lack the class.
            if items is train and not all(pieces):
                raise ConfigError(
                    f"{what}: class {names[label]!r} has too few images ({len(items[label])}) for "
                    f"its {len(owners)} clients; set fewer clients or more shots"
                )
            for client, piece in zip(owners, pieces, strict=True):
                parts[client][which].extend(piece)
    return parts
