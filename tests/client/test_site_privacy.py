"""Sites that keep their class names: no message, server file or result holds one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from client.node import Node
from client.site import Site
from deploy.loop import LoopTransport
from server.strategy import Coordinator

SECRETS = {
    "north": ("zebrafish lesion", "quokka fracture"),
    "south": ("axolotl scar", "narwhal ulcer", "pangolin cyst"),
}


def write_site(folder: Path, names: tuple[str, ...], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for part, count in (("train", 3), ("test", 2), ("novel", 1)):
        for name in names:
            # Nobody trains on what is in novel/.
            place = folder / part / (f"secret new {name}" if part == "novel" else name)
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"hush-{name}-{part}-{number}.png")


class Recorded(LoopTransport):
    """Keeps every message in both directions, as the bytes that would travel."""

    def __init__(self, nodes: Any) -> None:
        super().__init__(nodes)
        self.texts: list[str] = []

    def ask(self, requests, timeout):
        for request in requests.values():
            self.texts.append(request.pack()[0])
        for client, reply in super().ask(requests, timeout):
            self.texts.append(reply.pack()[0])
            yield client, reply


@pytest.fixture
def federation(tmp_path, tiny_experiment, tower):
    """(transport, coordinator, folder of the server) of two sites with different vocabularies."""
    sites = {}
    for number, (name, secrets) in enumerate(SECRETS.items()):
        folder = tmp_path / "secret-place" / name
        write_site(folder, secrets, number)
        sites[name] = Node(Site(name, tmp_path / "state" / name, data_dir=folder), "fed")
    experiment = tiny_experiment(
        backbone=tower("tower_a").model_dump(), data={"kind": "folders"}, train={"batch_size": 4}
    )
    transport = Recorded(sites)
    return transport, Coordinator(experiment, transport, tmp_path / "server", "fed", "loop")


def test_sites_with_different_classes_train_together_and_no_name_leaves_them(federation, tmp_path):
    transport, coordinator = federation
    coordinator.run()
    found = json.loads((tmp_path / "server" / "results.json").read_text())
    groups = found["final"]["counts"]
    assert {site: [groups[site][g][1] for g in ("local", "base", "novel")] for site in SECRETS} == {
        "north": [4, 4, 2],
        "south": [6, 6, 3],
    }
    # Join, two rounds and the last evaluation of two sites, there and back.
    assert len(transport.texts) == 16
    everything = [*transport.texts]
    for file in sorted((tmp_path / "server").rglob("*")):
        if file.is_file():
            everything.append(file.read_bytes().decode("latin1"))
    words = [w for names in SECRETS.values() for name in names for w in name.split()]
    for text in everything:
        for word in (*words, "hush", "secret-place", "manifest.csv"):
            assert word not in text


def test_new_images_and_classes_between_rounds_are_used_from_the_next_one_on(federation, tmp_path):
    transport, coordinator = federation
    coordinator.form()
    node = transport.nodes["north"]
    assert node.handle(_request(coordinator, "join")).train_images == 6
    folder = tmp_path / "secret-place" / "north" / "train" / "okapi rash"
    folder.mkdir()
    Image.new("RGB", (40, 40), (9, 9, 9)).save(folder / "1.png")
    reply = node.handle(_request(coordinator, "join"))
    assert (reply.error, reply.train_images) == (None, 7)
    assert node._loaded[1].data.base_names == (
        "okapi rash",
        "quokka fracture",
        "zebrafish lesion",
    )
    (folder / "2.png").write_bytes(b"half a file")
    reply = node.handle(_request(coordinator, "join"))
    assert reply.error is not None
    assert "E06" in reply.error
    assert "okapi" not in reply.error
    (folder / "2.png").unlink()
    assert node.handle(_request(coordinator, "join")).error is None


def _request(coordinator: Coordinator, kind: Any):
    from blend_core.messages import Request

    return Request(kind, "fed", 0, coordinator.experiment.to_json(), evaluate=True)
