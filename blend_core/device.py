"""Which processor or GPU `train.device` means on this machine."""

from __future__ import annotations

import torch

from blend_core.errors import ConfigError


def device_here(wanted: str) -> str:
    """The device that a setting means here: "cpu", or "cuda:N" with N from 0.

    Args:
        wanted: `train.device`: cpu, cuda (the first GPU), cuda:N, or auto (a GPU if there is one).

    Raises:
        ConfigError: there is no such GPU here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return "cpu"
    number = int(wanted.partition(":")[2] or 0)
    if number >= count:
        raise ConfigError(
            f"train.device = {wanted!r}: {count} CUDA devices here; use cpu or auto, or check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return f"cuda:{number}"
