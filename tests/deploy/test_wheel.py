"""The product works from a built and installed wheel, in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str], folder: Path, path: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        # Before the site packages, and so before an editable checkout.
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the packages of the built wheel and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "blend_core/assets/blend-tiny.safetensors" in names
    assert "blend_core/configs/quickstart.yaml" in names
    assert not [name for name in names if name.startswith("tests/")]
    target = folder / "site"
    run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], folder)
    return target


def test_one_round_in_processes_from_the_wheel(installed, tmp_path):
    code = "import blend_core, client, server, deploy; print(deploy.__file__)"
    where = run([sys.executable, "-c", code], tmp_path, installed)
    assert where.startswith(str(installed))
    command = [sys.executable, "-m", "deploy.cli", "run", "--out", "result"]
    for setting in ("clients=2", "rounds=1", "data.shots=2", "data.test_per_class=1"):
        command += ["--set", setting]
    output = run(command, tmp_path, installed)
    assert "results:" in output
    results = json.loads((tmp_path / "result" / "results.json").read_text())
    assert results["engine"] == "processes"
    assert [row["status"] for row in results["rounds"][0]["clients"]] == ["accepted", "accepted"]
    # The SuperNodes' workers ran the wheel's code, not the checkout's.
    workers = [p.read_text() for p in (tmp_path / "result").rglob("worker.log")]
    assert len(workers) == 2
    assert all(f"worker of {installed / 'client'}" in log for log in workers)
