"""Local differential privacy: noise on a site's upload before anything leaves it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blend_core.config import Experiment, PrivacyConfig
from blend_core.messages import Tensors, flatten, shaped
from blend_core.noise import NEXT_TO_NOTHING, global_numpy, noise_seed

Vector = npt.NDArray[np.float64]


def outgoing(
    trained: Tensors, received: Tensors, experiment: Experiment, folder: Path, client: str
) -> Tensors:
    """What a site uploads: its trained shared tensors, with noise if `privacy.kind` is local.

    The change is clipped to `clipping_norm` C. Any two uploads differ by at most 2 C, so the noise
    has deviation 2 C z, and an upload costs what one Gaussian mechanism with noise multiplier z
    costs.

    Args:
        trained, received: the shared tensors by name after and before the local update.
        experiment: its privacy settings.
        folder: of the site's private state, for the key of its noise.
        client: the site's name.
    """
    if experiment.privacy.kind != "local" or not trained:
        return trained
    before, after = flatten(received), flatten(trained)
    # The same round asked again with other tensors must not get the same noise: the difference of
    # the two answers would be bare.
    what = hashlib.sha256(before.tobytes() + after.tobytes()).hexdigest()
    start = before.astype(np.float64)
    with global_numpy(noise_seed(experiment, folder, client, what)):
        change = _clipped_with_noise(after.astype(np.float64) - start, experiment.privacy)
    return shaped(start + change, trained)


def _clipped_with_noise(change: Vector, privacy: PrivacyConfig) -> Vector:
    """A change [P] after what Flower's `LocalDpMod` does, whose two steps these are.

    The mod itself takes an epsilon and makes the deviation of it by a formula that holds below 1
    only; here the deviation is given, and what it costs is accounted for exactly.
    """
    from flwr.supercore.differential_privacy import (
        add_gaussian_noise_inplace,
        compute_clip_model_update,
    )

    if not change.any():
        change[0] = NEXT_TO_NOTHING
    arrays = [change]
    compute_clip_model_update(arrays, [np.zeros_like(change)], privacy.clipping_norm)
    add_gaussian_noise_inplace(arrays, 2 * privacy.clipping_norm * privacy.noise_multiplier)
    return arrays[0]
