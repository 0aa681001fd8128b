"""Methods by name, and methods of other packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blend_core.errors import ConfigError
from blend_core.methods import BUILT_IN, method_class

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


def test_a_foreign_method_never_replaces_ours(tmp_path):
    install(tmp_path, "zero-shot", "no_such_module:Broken")
    assert blend(tmp_path, "method.name=zero-shot").returncode == 0


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(ConfigError) as refused:
        method_class("fedavg")
    assert all(name in str(refused.value) for name in BUILT_IN)
