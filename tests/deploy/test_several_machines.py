"""README's commands for a federation over several machines, word for word, on this one."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.children import Family
from deploy.engine import Workspace, free_ports, script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(start: str) -> str:
    """The code block of README that begins with `start`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (found,) = [text for text in blocks if text.startswith(start)]
    return found


def command(start: str, changes: dict[str, str]) -> list[str]:
    text = block(start)
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    name, *arguments = shlex.split(text.replace("\\\n", ""))
    return [script(name), *arguments]


def photographs(folder: Path, classes: list[str]) -> None:
    draw = np.random.default_rng(len(str(folder)))
    for part, count in (("train", 4), ("test", 2)):
        for name in classes:
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


@pytest.mark.slow
def test_three_sites_train_with_the_documented_commands(tmp_path):
    workspace = Workspace(tmp_path / "flower", "several")
    link, *ports = free_ports(4)
    connection = block("[superlink.hospitals]").replace("SERVER:9300", f"127.0.0.1:{link}")
    (workspace.home / "config.toml").write_text(connection)
    sites = {
        "hospital-a": ["cat", "dog"],
        "hospital-b": ["bus", "car", "bike"],
        "hospital-c": ["cat", "bird"],
    }
    out = tmp_path / "run-1"
    with Family(workspace.environment(4), workspace.logs) as family:
        family.start(
            "superlink", command("flower-superlink", {"0.0.0.0": "127.0.0.1", "9300": str(link)})
        )
        for (name, classes), port in zip(sites.items(), ports, strict=True):
            photographs(tmp_path / name, classes)
            changes = {
                "SERVER:9300": f"127.0.0.1:{link}",
                "hospital-a": name,
                "/data/photos": str(tmp_path / name),
                "/var/lib/blend": str(tmp_path / "state"),
            }
            node = command("flower-supernode", changes)
            # Three on one machine: each needs its own port for its ClientApps.
            family.start(name, [*node, "--port", str(port)])
        run = command("flwr run", {"/srv/blend/run-1": str(out), "run . ": f"run {ROOT} "})
        deadline = time.monotonic() + 60
        while True:  # The SuperLink needs a moment to listen.
            submitted = family.start("run", run)
            code = submitted.process.wait(timeout=240)
            if code == 0 or time.monotonic() > deadline:
                break
    log = submitted.output()
    assert (out / "results.json").exists(), log[-3000:]
    results = json.loads((out / "results.json").read_text())
    assert [c["name"] for c in results["clients"]] == sorted(sites)
    assert [c["train_images"] for c in results["clients"]] == [8, 12, 8]
    assert results["final"]["counts"]["hospital-b"]["base"][1] == 6
    for name in sites:
        assert list((tmp_path / "state").rglob(f"{name}/round-*.safetensors")), name
    # Class names of a node's own vocabulary are in no file of the server and no message.
    for path in out.rglob("*"):
        if path.is_file():
            assert b"bike" not in path.read_bytes(), path
