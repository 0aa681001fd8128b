"""Dirichlet shares of every class over clients, alike for training and test (PROTOCOL 3c)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blend_core.data.fewshot import items_by_class
from blend_core.errors import ConfigError
from blend_core.randomness import numpy_generator

__all__ = ["ATTEMPTS", "Split", "cut", "dirichlet"]

# Training and test positions of one client.
Split = tuple[list[int], list[int]]

ATTEMPTS = 10_000
# So many attempts are drawn at a time.
_BATCH = 250
# After so many attempts the best one must have served this share of the clients, or there is no
# hope: where a draw succeeds at all, the best ones before it lack a client or two. So many may
# lack in any case: of a few clients, one is a large share.
_HOPE = {_BATCH: 0.5, 4 * _BATCH: 0.9}
_LACKING = 2


def dirichlet(
    train_labels: Sequence[int],
    test_labels: Sequence[int],
    clients: int,
    beta: float,
    least: int,
    seed: int,
    *purpose: str,
) -> list[Split]:
    """Cut every class by shares from Dirichlet(beta, ..., beta), one for training and test.

    A client that already holds an equal part of all training images gets nothing of the next
    classes. The draw is repeated until every client has `least` training and `least` test images.

    Args:
        train_labels: the class of every training item.
        test_labels: the class of every test item.
        clients: number of clients, 1 or more.
        beta: concentration, above 0; the smaller, the fewer clients hold a class.
        least: smallest number of training and of test images of a client.
        seed: the partition seed.
        purpose: further words that name the stream.

    Returns:
        Per client, positions in `train_labels` and in `test_labels`.

    Raises:
        ConfigError: there are too few images; or no draw of 10,000 gave every client enough; or
            there is no hope of one, and the search ends early: the best of the first 250 draws
            served fewer than half of the clients, or the best of the first 1,000 fewer than nine
            tenths. A draw that misses only two clients always leaves hope.
    """
    train, test = items_by_class(train_labels), items_by_class(test_labels)
    classes = sorted(train.keys() | test.keys())
    what = f"beta {beta:g}, {clients} clients, {len(classes)} classes" + "".join(
        f", {word}" for word in purpose
    )
    for name, count in (("training", len(train_labels)), ("test", len(test_labels))):
        if count < least * clients:
            raise ConfigError(
                f"data.partition dirichlet ({what}): {count} {name} images are fewer than {least} "
                "for every client; set fewer clients"
            )
    sizes = np.array([[len(part.get(k, ())) for k in classes] for part in (train, test)])
    generator = numpy_generator(seed, "partition", "dirichlet", *purpose)
    best = 0
    for attempt in range(0, ATTEMPTS, _BATCH):
        shares, served = _attempts(sizes, clients, beta, least, generator)
        if (served == clients).any():
            break
        best, drawn = max(best, int(served.max())), attempt + _BATCH
        hopeless = best < min(clients * _HOPE.get(drawn, 0), clients - _LACKING)
        if hopeless or drawn >= ATTEMPTS:
            raise ConfigError(
                f"data.partition dirichlet ({what}): in {drawn} draws at most {best} "
                f"clients got {least} training and test images; set a larger data.alpha or fewer "
                "clients"
            )
    chosen = shares[int((served == clients).argmax())]
    shuffle = numpy_generator(seed, "partition", "dirichlet", "shuffle", *purpose)
    parts: list[Split] = [([], []) for _ in range(clients)]
    for share, label in zip(chosen, classes, strict=True):
        for which, items in enumerate((train, test)):
            for part, piece in zip(parts, cut(items.get(label, []), share, shuffle), strict=True):
                part[which].extend(piece)
    return parts


def cut(
    items: Sequence[int], share: npt.NDArray[np.float64], generator: np.random.Generator
) -> list[list[int]]:
    """Shuffle items and cut them at floor(cumulated share x number).

    Args:
        items: positions.
        share: shape [clients], sums to 1.
        generator: draws the order.
    """
    order = generator.permutation(np.asarray(items, dtype=np.int64))
    ends = _ends(share, len(items))
    return [piece.tolist() for piece in np.split(order, ends[:-1])]


def _ends(share: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Where each client's piece ends, shape of `share`; the last one takes what is left."""
    # A cumulated 0.99999999 must not leave an image to a client with no share.
    ends = np.floor(np.cumsum(share, -1) * count + 1e-9).astype(np.int64)
    ends[..., -1] = count
    return ends


def _attempts(
    sizes: npt.NDArray[np.int64],
    clients: int,
    beta: float,
    least: int,
    generator: np.random.Generator,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """A batch of attempts: shares [attempts, classes, clients], and how many clients have enough.

    Nothing is indexed here: counting is all that an attempt needs.
    """
    classes = sizes.shape[1]
    fair = sizes[0].sum() / clients
    held = np.zeros((2, _BATCH, clients), dtype=np.int64)
    shares = np.zeros((_BATCH, classes, clients))
    alive = np.ones(_BATCH, dtype=bool)
    for k in range(classes):
        drawn = generator.dirichlet(np.full(clients, beta), size=_BATCH)
        drawn[held[0] >= fair] = 0
        total = drawn.sum(1)
        # All that was left of the shares may be 0: no attempt can go on from there.
        alive &= total > 0
        shares[:, k] = drawn / np.where(total > 0, total, 1)[:, None]
        for which in range(2):
            ends = _ends(shares[:, k], int(sizes[which, k]))
            held[which] += np.diff(ends, axis=1, prepend=0)
    served = (held >= least).all(0).sum(1)
    return shares, np.where(alive, served, 0)
