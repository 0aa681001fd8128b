"""Private generators: every draw of chance has its own, derived from what it is for.

A stream is named by (seed, purpose, ...): adding a draw in one place never shifts another, and
no global generator is ever seeded or consulted. Seed 0 is a seed like any other.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Derive a 63-bit seed from the run's seed and the purpose of the draw.

    Args:
        seed: the run's (or partition's, or few-shot) seed, any integer >= 0.
        purpose: words and numbers that name the stream, e.g. ("shuffle", "client-03", 7).

    Returns:
        An integer in [0, 2**63), the same on every machine and in every Python version.
    """
    text = json.dumps([int(seed), *purpose])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A NumPy generator of its own for one purpose; see `derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU torch generator of its own for one purpose; see `derive_seed`."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *purpose))
