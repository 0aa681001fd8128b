"""From the round's uploads to new shared tensors: by the exact mean or by a rule of Flower's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from blend_core.config import Experiment
from blend_core.messages import Tensors, flatten, shaped
from server.budget import Budget


def aggregate(
    experiment: Experiment,
    round: int,
    shared: Tensors,
    uploads: Mapping[str, Tensors],
    images: Mapping[str, int],
    asked: int,
    budget: Budget,
    folder: Path,
) -> Tensors:
    """The new shared tensors, by `server.aggregation` and `privacy`.

    Args:
        experiment: the resolved experiment.
        round: number of the round.
        shared: what clients were sent.
        uploads: client -> shared tensors; the same names and shapes for all, at least one.
        images: client -> number of training images, positive; read by the mean alone.
        asked: clients that were asked in this round.
        budget: holds the clipping norm; adaptive clipping moves it.
        folder: of the run, for the key of the server's noise.
    """
    protected = experiment.privacy.kind == "central"
    if experiment.server.aggregation == "mean" and not protected:
        return weighted_mean(uploads, images)
    from server.flower_rules import central, robust

    before = flatten(shared).astype(np.float64)
    changes = {c: flatten(uploads[c]).astype(np.float64) - before for c in sorted(uploads)}
    if protected:
        norm = budget.clipping_norm
        change, budget.clipping_norm = central(changes, asked, experiment, norm, round, folder)
    else:
        change = robust(list(changes.values()), experiment.server)
    return shaped(before + change, shared)


def weighted_mean(uploads: Mapping[str, Tensors], images: Mapping[str, int]) -> Tensors:
    """Sum of n_i / n times theta_i over the round's participants (METHODS 10.4).

    Sums run in float64 in the order of client names and are cast to float32 once, so neither the
    order of replies nor the engine changes a bit.

    Args:
        uploads: client name -> shared tensors; the same names and shapes for all, at least one.
        images: client name -> number of training images, positive.
    """
    clients = sorted(uploads)
    total = sum(images[client] for client in clients)
    mean: Tensors = {}
    for name in sorted(uploads[clients[0]]):
        value = np.zeros(uploads[clients[0]][name].shape, dtype=np.float64)
        for client in clients:
            value += (images[client] / total) * uploads[client][name].astype(np.float64)
        mean[name] = value.astype(np.float32)
    return mean
