"""Numeric fixtures and the random towers they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

FIXTURES = Path(__file__).parent / "fixtures"


def read_fixture(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    meta = json.loads((FIXTURES / f"{name}.json").read_text())
    arrays = np.load(FIXTURES / f"{name}.npz")
    return meta, {key: arrays[key] for key in arrays.files}


def tower_state(name: str) -> dict[str, torch.Tensor]:
    """Weights of a fixture tower with a full token table."""
    _, arrays = read_fixture(name)
    state = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith("w/")}
    rows = state.pop("token_embedding.rows")
    table = torch.zeros(49408, rows.shape[1])
    table[torch.from_numpy(arrays["token_row_ids"])] = rows
    state["token_embedding.weight"] = table
    return state


def tower_description(state: dict[str, torch.Tensor], quick_gelu: bool = True) -> dict[str, Any]:
    """open_clip's description of a model with these weights; head width 64 in both towers."""

    def layers(prefix: str) -> int:
        return len({k.split(".")[-3] for k in state if k.startswith(prefix) and "ln_1.w" in k})

    width, patch = state["visual.conv1.weight"].shape[0], state["visual.conv1.weight"].shape[-1]
    grid = round((state["visual.positional_embedding"].shape[0] - 1) ** 0.5)
    text_width = state["ln_final.weight"].shape[0]
    return {
        "embed_dim": state["text_projection"].shape[1],
        "quick_gelu": quick_gelu,
        "vision_cfg": {
            "image_size": grid * patch,
            "layers": layers("visual.transformer"),
            "width": width,
            "patch_size": patch,
        },
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": text_width,
            "heads": text_width // 64,
            "layers": layers("transformer"),
        },
    }
