"""Numeric fixtures and the random towers they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server.aggregation import weighted_mean

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


def close(value: torch.Tensor, expected: np.ndarray, atol: float) -> None:
    """Assert equality to an absolute tolerance, without a relative one."""
    torch.testing.assert_close(
        value.detach().cpu().float(), torch.from_numpy(np.asarray(expected)), atol=atol, rtol=0
    )


def assert_gradients(
    gradients: dict[str, torch.Tensor],
    arrays: dict[str, np.ndarray],
    prefix: str,
    zero: tuple[str, ...] = (),
) -> None:
    """Each gradient within 1e-4 of its largest stored entry; `zero` ones 1e-5 absolute."""
    for name, gradient in gradients.items():
        expected = arrays[prefix + name]
        atol = 1e-5 if name in zero else 1e-4 * float(np.abs(expected).max())
        close(gradient, expected.reshape(tuple(gradient.shape)), atol)


def assert_server_mean(arrays: dict[str, np.ndarray], names: list[str]) -> None:
    """The server's mean of the stored uploads is the stored aggregate, to 1e-6."""
    counts = arrays["server/counts"]
    uploads = {
        f"c{i}": {name: arrays[f"server/upload/{name}"][i] for name in names}
        for i in range(len(counts))
    }
    mean = weighted_mean(uploads, {f"c{i}": int(n) for i, n in enumerate(counts)})
    for name in names:
        close(torch.from_numpy(mean[name]), arrays[f"server/aggregate/{name}"], 1e-6)
