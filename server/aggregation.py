"""The weighted mean of uploads, exact in its order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from blend_core.messages import Tensors


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
