"""Where the noise of differential privacy comes from, and how Flower's code is fed with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from blend_core.config import Experiment
from blend_core.randomness import derive_seed
from blend_core.state import StateError, make_folder, write_bytes_atomic

# Whoever has it can take the noise off again: it never travels and belongs in no results.
KEY_FILE = "noise.key"
_KEY_BYTES = 32

# Flower divides by the norm of a change and fails at 0. This one is lost in any sum.
NEXT_TO_NOTHING = 1e-100


def noise_seed(experiment: Experiment, folder: Path, *purpose: str | int) -> int:
    """Seed of one draw of noise; the same again when a round is done again.

    Args:
        experiment: `privacy.noise_from` says whether the seed is secret.
        folder: where this party keeps what only it may read; gets `noise.key`.
        purpose: names the draw, e.g. a round, and a hash of what is covered: one noise on two
            contents gives their difference away.

    Returns:
        An integer in [0, 2**63).

    Raises:
        StateError: the key cannot be read or written.
    """
    root = experiment.seed
    if experiment.privacy.noise_from == "secret":
        root = _key(folder)
    return derive_seed(root, "privacy", *purpose)


def require_server_key(experiment: Experiment, folder: Path, finished: int) -> None:
    """Refuse to draw a server's key anew: a round that is done again would get other noise.

    Args:
        experiment: its privacy settings.
        folder: of the run.
        finished: newest round that has a checkpoint, 0 before the first.

    Raises:
        StateError: rounds are done, and the key of their noise is gone.
    """
    privacy, path = experiment.privacy, folder / KEY_FILE
    if finished < 1 or privacy.kind != "central" or privacy.noise_from != "secret":
        return
    if not path.exists():
        raise StateError(
            f"{path}: is missing, and there are checkpoints up to round {finished}; restore it "
            "from the backup of the run (a round that was released would get other noise)"
        )


def _key(folder: Path) -> int:
    """The folder's key; drawn by the operating system when there is none."""
    path = folder / KEY_FILE
    try:
        text = path.read_text(encoding="ascii") if path.exists() else None
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read: {error}") from None
    if text is None:
        make_folder(folder)
        text = os.urandom(_KEY_BYTES).hex()
        write_bytes_atomic(path, text.encode(), mode=0o600)
    try:
        if len(text) != 2 * _KEY_BYTES:
            raise ValueError
        return int(text, 16)
    except ValueError:
        raise StateError(
            f"{path}: is damaged; restore it from a backup (before the first round, delete it: a "
            "new one is drawn)"
        ) from None


@contextmanager
def global_numpy(seed: int) -> Iterator[None]:
    """Let NumPy's global generator draw from `seed` inside, and go on as before afterwards.

    Flower's wrappers and mods draw from the global generator and take no other.
    """
    before = np.random.get_state()
    np.random.set_state(np.random.RandomState(np.random.MT19937(seed)).get_state())
    try:
        yield
    finally:
        np.random.set_state(before)
