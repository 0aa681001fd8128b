"""A thousand classes in stated memory: the text tower runs in chunks, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from matrix import ROWS

from blend_core.methods import config_class

# Every method in a process of its own, forked from one that holds the backbone; each prints the
# megabytes by which a training step and a pass over test images raise its peak.
SCRIPT = """
import json, os, resource, sys
import open_clip, torch
from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig, parse_experiment
from blend_core.methods import build_method

model, chunk, methods = json.loads(sys.argv[1])
torch.set_num_threads(1)
if model == "blend-tiny":
    config = BackboneConfig(text_chunk=chunk)
    backbone = Backbone.load(config)
else:
    described = Backbone.describe(BackboneConfig(name=model, weights="openai", text_chunk=chunk))
    filled = open_clip.create_model(model).requires_grad_(False).eval()
    backbone = Backbone(model, filled, described.preprocess, chunk)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

words = ["red", "green", "blue", "pink", "white", "black", "brown", "gold", "grey", "lime"]
names = [f"{a} {b} {c}" for a in words for b in words for c in words]
images = torch.zeros(4, 3, *2 * [backbone.preprocess.size])
for settings in methods:
    if os.fork() == 0:
        experiment = parse_experiment({"method": settings})
        method = build_method(experiment.method, backbone, 0)
        classes = method.tokenize(names, "a photo of a {}.")
        method.draws = torch.Generator().manual_seed(0)
        before = peak()
        if method.trains:
            method.loss(images, torch.tensor([0, 1, 2, 999]), classes)["loss"].backward()
        method.draws = None
        with torch.no_grad():
            assert method.logits(images, classes).shape == (4, 1000)
        print(json.dumps([settings["name"], peak() - before]), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def growth(model: str, chunk: int, methods: list[dict], timeout: float) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([model, chunk, methods])],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_a_thousand_classes_on_the_tiny_clip_need_little_memory():
    methods = [{"name": name, **row.small} for name, row in ROWS.items()]
    found = growth("blend-tiny", 64, methods, 240)
    assert sorted(found) == sorted(ROWS)
    # FedPHA, at the top, makes three passes with gradients.
    assert {name: grown for name, grown in found.items() if grown > 300} == {}
    whole = growth("blend-tiny", 1000, [{"name": "promptfl", **ROWS["promptfl"].small}], 120)
    assert whole["promptfl"] > 2 * found["promptfl"]


@pytest.mark.slow
def test_a_thousand_classes_on_vit_b_16_need_less_than_five_gigabytes():
    methods = [
        config_class(name)(name=name).model_dump()
        for name in ("promptfl", "fedpgp", "clip-lora", "pfedmma")
    ]
    found = growth("ViT-B-16-quickgelu", 128, methods, 1200)
    assert {name: grown for name, grown in found.items() if grown > 5000} == {}
