"""`flwr run .` works from the checkout: the app part of pyproject.toml follows the schema."""

from __future__ import annotations

import io
import tomllib
import zipfile
from pathlib import Path

from flwr.cli.build import build_fab_from_disk
from flwr.common.config import flatten_dict

from blend_core.methods import config_class
from blend_core.settings import experiment_from_run_config, load_experiment
from deploy.app_config import app_config

ROOT = Path(__file__).parents[2]


def test_pyproject_carries_the_generated_settings():
    text = (ROOT / "pyproject.toml").read_text()
    assert app_config() in text, "run `python -m deploy.app_config` and put it into pyproject.toml"


def test_a_setting_of_several_methods_has_the_help_of_each():
    lines = [line.split(' = "" # ') for line in app_config().splitlines()]
    helps = {parts[0]: parts[1] for parts in lines if len(parts) == 2}

    def own(method: str, field: str) -> str | None:
        return config_class(method).model_fields[field].description

    ratios = f"clip-adapter: {own('clip-adapter', 'ratio')}; fedpha: {own('fedpha', 'ratio')}"
    assert helps["method.ratio"] == ratios
    # Methods with the same text share it; what all have needs no names.
    shared = f"mma-fedavg, pfedmma: {own('mma-fedavg', 'last_blocks')}"
    assert helps["method.last_blocks"] == shared
    assert helps["method.name"] == own("blend", "name")


def test_empty_settings_are_the_quickstart_and_given_ones_win():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = flatten_dict(settings)
    # Flower's local simulation has two nodes.
    assert experiment_from_run_config(flat) == load_experiment("quickstart", ["clients=2"])
    flat |= {"rounds": 3, "method.gamma": 0.25, "data.classes": '["a", "b"]'}
    flat |= {"data.kind": "folders"}
    experiment = experiment_from_run_config(flat)
    assert (experiment.rounds, experiment.method.gamma) == (3, 0.25)
    assert experiment.data.classes == ["a", "b"]
    flat |= {"method.gamma": "", "method.name": "zero-shot"}
    assert experiment_from_run_config(flat).method.name == "zero-shot"


def test_the_bundle_carries_no_code_of_ours():
    """A package in the bundle would hide the installed one and the assets beside it."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))) as bundle:
        names = bundle.namelist()
    assert "pyproject.toml" in names
    assert not [name for name in names if name.endswith((".py", ".safetensors", ".json"))]
