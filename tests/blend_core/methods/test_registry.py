"""Methods by name, and methods of other packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blend_core import methods
from blend_core.errors import ConfigError
from blend_core.methods import BUILT_IN, method_class
from blend_core.settings import load_experiment
from deploy.check import check

GUIDE = Path(__file__).parents[3] / "docs" / "adding-a-method.md"


def install(folder: Path, name: str, value: str) -> None:
    """What pip leaves behind for a package with one entry point."""
    info = folder / "feature_scale-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: feature-scale\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[blend.methods]\n{name} = {value}\n")


def blend(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    small = ["rounds=1", "clients=2", "data.shots=1", "data.test_per_class=1", *settings]
    arguments = [part for setting in small for part in ("--set", setting)]
    arguments += ["--engine", "loop", "--out", str(folder / "run")]
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "run", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_guides_method_runs_from_another_package(tmp_path):
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 40
    (tmp_path / "feature_scale.py").write_text(code[1])
    install(tmp_path, "feature-scale", "feature_scale:FeatureScale")
    done = blend(tmp_path, "method.name=feature-scale", "method.strength=2.0", "train.lr=0.01")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["parameters"] == {"shared": 128, "private": 128, "trainable": 256}
    assert results["config"]["method"] == {"name": "feature-scale", "strength": 2.0}
    private = {client["private_sha256"] for client in results["clients"]}
    assert len(private) == 2


def test_a_foreign_method_that_cannot_be_imported_is_one_line(tmp_path):
    install(tmp_path, "broken", "no_such_module:Broken")
    done = blend(tmp_path, "method.name=broken")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no_such_module:Broken cannot be imported" in line


GOOD = """
import torch
from torch import nn
from blend_core.config import MethodConfig
from blend_core.methods.base import Method

class Good(Method):
    Config = MethodConfig

    def __init__(self, config, backbone, seed):
        super().__init__(config, backbone, seed)
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(3))

    def shared(self):
        return {"a": self.a}

    def private(self):
        return {"b": self.b}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import torch\n", "raise ValueError('two\\nlines')\n", "cannot be imported: ValueError"),
        ("import torch\n", "raise SystemExit(7)\n", "cannot be imported: SystemExit"),
        ("import torch\n", "def broken(:\n", "cannot be imported: SyntaxError"),
        ("(Method)", "(nn.Module)", "is not a class derived from Method"),
        ("Config = MethodConfig", "Config = dict", "no Config derived from MethodConfig"),
        ("(config, backbone, seed)\n", "(1 / 0)\n", "cannot be built: ZeroDivisionError"),
        ('return {"b": self.b}', "return {}", "parameter b is trained, but neither shared"),
        ('{"b": self.b}', '{"a": self.b}', "a tensor is shared and private: a"),
        ('{"b": self.b}', '{"b": self.a}', "shared and private: by two names"),
        ('{"b": self.b}', "[self.b]", "private() must be a dictionary"),
        ('{"b": self.b}', '{"payload/b": self.b}', "letters, digits, and . _ - only"),
        ('{"b": self.b}', "{7: self.b}", "private() must be a dictionary of parameters by name"),
        (
            '{"b": self.b}',
            '{"b": self.b, "t": self.backbone.model.logit_scale}',
            "t is not a parameter of the method's own",
        ),
        (
            "self.b = nn.Parameter(torch.zeros(3))",
            "self.b = torch.zeros(3)",
            "b is not a parameter",
        ),
        ("torch.zeros(3)", "torch.zeros(3).double()", "torch.float64, must be float32"),
    ],
)
def test_what_is_wrong_with_a_foreign_method_is_one_line_before_anything_starts(
    tmp_path, monkeypatch, old, new, message
):
    name = f"foreign_{abs(hash((old, new)))}"
    assert old in GOOD
    (tmp_path / f"{name}.py").write_text(GOOD.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(methods._METHODS, "foreign", f"{name}:Good")
    methods._known.cache_clear()
    with pytest.raises(ConfigError) as refused:
        check(load_experiment("quickstart", ["method.name=foreign"]))
    methods._known.cache_clear()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_foreign_method_never_replaces_ours(tmp_path):
    install(tmp_path, "zero-shot", "no_such_module:Broken")
    assert blend(tmp_path, "method.name=zero-shot").returncode == 0


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(ConfigError) as refused:
        method_class("fedavg")
    assert all(name in str(refused.value) for name in BUILT_IN)
