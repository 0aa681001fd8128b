"""Shared test material: numeric fixtures, the random towers they belong to, tiny experiments."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

# A machine with CUDA must compute what the fixtures hold: no reduced-precision products.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import pytest
from safetensors.torch import save_file
from support import tower_description, tower_state

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig, Experiment, parse_experiment


@pytest.fixture(scope="session")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BackboneConfig]:
    """Files of a fixture tower: name -> the configuration that loads it."""
    configs: dict[str, BackboneConfig] = {}

    def config(name: str) -> BackboneConfig:
        if name not in configs:
            folder = tmp_path_factory.mktemp(name)
            state = tower_state(name)
            save_file({k: v.contiguous() for k, v in state.items()}, folder / "weights.safetensors")
            (folder / "model.json").write_text(json.dumps(tower_description(state)))
            configs[name] = BackboneConfig(
                name=str(folder / "model.json"), weights=str(folder / "weights.safetensors")
            )
        return configs[name]

    return config


@pytest.fixture(scope="session")
def backbone(tower: Callable[[str], BackboneConfig]) -> Callable[[str], Backbone]:
    """Loaded fixture towers by name."""
    loaded: dict[str, Backbone] = {}

    def load(name: str) -> Backbone:
        if name not in loaded:
            loaded[name] = Backbone.load(tower(name))
        return loaded[name]

    return load


@pytest.fixture
def tiny_experiment() -> Callable[..., Experiment]:
    """A federation that takes a second: 2 clients, 2 rounds, few images, small adapters."""

    def build(**changes: Any) -> Experiment:
        data: dict[str, Any] = {
            "seed": 1,
            "rounds": 2,
            "clients": 2,
            "method": {
                "name": "blend",
                "gamma": 0.43,
                "vision_rank": 4,
                "text_rank": 4,
                "projection_rank": 8,
            },
            "data": {"shots": 2, "test_per_class": 1},
            "train": {"batch_size": 16},
        }
        for key, value in changes.items():
            if isinstance(value, dict) and key in data:
                data[key] = {**data[key], **value}
            else:
                data[key] = value
        kind = data["data"].get("kind", "shapes")
        if kind != "shapes":
            del data["data"]["test_per_class"]
        if kind == "folders":
            del data["data"]["shots"]
        return parse_experiment(data)

    return build
