"""What a site's operator lets a server ask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from blend_core.backbone import Backbone
from blend_core.errors import ConfigError, SiteError
from blend_core.messages import Request
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.state import tensors_sha256
from client.node import Node
from client.policy import read_policy
from client.site import KEYS, Site
from deploy.loop import LoopTransport
from server.strategy import Coordinator


@pytest.fixture
def site(tmp_path):
    """A site with four images in secret-place/ward, whose policy is policy.yaml."""
    draw, data = np.random.default_rng(3), tmp_path / "secret-place" / "ward"
    for name in ("cat", "dog"):
        place = data / "train" / name
        place.mkdir(parents=True)
        for number in range(2):
            pixels = draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    policy = tmp_path / "secret-place" / "policy.yaml"
    return Site("north", tmp_path / "state", data_dir=data, policy=policy)


@pytest.fixture
def experiment(tiny_experiment, tower):
    def build(**changes):
        given = {"backbone": tower("tower_a").model_dump(), "data": {"kind": "folders"}}
        return tiny_experiment(**{**given, **changes})

    return build


def shared_of(experiment):
    described = Backbone.describe(experiment.backbone)
    return snapshot(build_method(experiment.method, described, experiment.seed).shared())


def join(experiment) -> Request:
    return Request("join", "fed", 0, experiment.to_json())


ROOT = "/data"


@pytest.mark.parametrize(
    ("policy", "changes", "refused"),
    [
        ("methods: [promptfl, fedotp]", {}, "method.name = 'blend' (methods: promptfl, fedotp)"),
        ("max_rank: 7", {}, "method.projection_rank = 8 (max_rank: 7)"),
        (
            "max_rank: 1000",
            {"method": {"text_rank": "full"}},
            "method.text_rank = full (max_rank: 1000)",
        ),
        ("max_rounds: 1", {}, "rounds = 2 (max_rounds: 1)"),
        (
            "max_local_epochs: 2",
            {"train": {"local_epochs": 3}},
            "train.local_epochs = 3 (max_local_epochs: 2)",
        ),
        (
            "max_local_steps: 9",
            {"train": {"local_steps": 10}},
            "train.local_steps = 10 (max_local_steps: 9)",
        ),
        # A bound in the one unit must not be got round by the other.
        ("max_local_epochs: 2", {"train": {"local_steps": 1}}, "train.local_steps (max_local_"),
        ("max_local_steps: 9", {}, "an experiment without train.local_steps (max_local_steps: 9)"),
        ("data_kinds: [shapes, dtd]", {}, "data.kind = 'folders' (data_kinds: shapes, dtd)"),
        (f"data_roots: [{ROOT}]", {}, "the site's data-dir (data_roots)"),
        (
            "label_spaces: [node]",
            {"data": {"kind": "folders", "label_space": "federation", "classes": ["cat", "dog"]}},
            "data.label_space = 'federation' (label_spaces: node)",
        ),
        ("min_train_images: 5", {}, "to take part with so few training images (min_train_images)"),
        ("weights: [openai]", {}, "(weights: openai)"),
        ("backbones: [ViT-B-32]", {}, "(backbones: ViT-B-32)"),
        (f"backbone_sha256: ['{'0' * 64}']", {}, " (backbone_sha256)"),
        (
            "precisions: [fp32]",
            {"train": {"precision": "bf16"}},
            "train.precision = 'bf16' (precisions: fp32)",
        ),
        ("devices: [cuda, auto]", {}, "train.device = 'cpu' (devices: cuda, auto)"),
        ("devices: [cpu]", {"train": {"device": "cuda:1"}}, "train.device = 'cuda' (devices: cpu)"),
        (
            "privacy_kinds: [local]",
            {"privacy": {"kind": "central"}},
            "privacy.kind = 'central' (privacy_kinds: local)",
        ),
        # No noise is less than any.
        ("min_noise_multiplier: 0.5", {}, "privacy.kind = 'none' (min_noise_multiplier: 0.5)"),
        ("max_clipping_norm: 0.5", {}, "privacy.kind = 'none' (max_clipping_norm: 0.5)"),
        (
            "min_noise_multiplier: 2",
            {"privacy": {"kind": "local", "noise_multiplier": 1.5}},
            "privacy.noise_multiplier = 1.5 (min_noise_multiplier: 2.0)",
        ),
        (
            "max_clipping_norm: 0.5",
            {"privacy": {"kind": "local", "clipping_norm": 0.6}},
            "privacy.clipping_norm = 0.6 (max_clipping_norm: 0.5)",
        ),
        (
            "max_clipping_norm: 1",
            {"privacy": {"kind": "central", "clipping": "adaptive"}},
            "privacy.clipping = 'adaptive' (max_clipping_norm: 1.0)",
        ),
        # Noise that follows from what the server knows is none.
        (
            "privacy_kinds: [local]",
            {"privacy": {"kind": "local", "noise_from": "seed"}},
            "privacy.noise_from = 'seed' (privacy_kinds: local)",
        ),
        (
            "min_noise_multiplier: 1",
            {"privacy": {"kind": "local", "noise_from": "seed"}},
            "privacy.noise_from = 'seed' (min_noise_multiplier: 1.0)",
        ),
    ],
)
def test_a_request_outside_a_rule_is_refused_with_the_rules_name(
    site, experiment, policy, changes, refused
):
    site.policy.write_text(policy)
    reply = Node(site, "fed").handle(join(experiment(**changes)))
    assert (reply.error or "").startswith("the site's policy refuses ")
    assert refused in (reply.error or "")
    assert (reply.exit_code, reply.statistics) == (2, {})
    assert "secret-place" not in (reply.error or "")


EVERYTHING = """
methods: [blend]
max_rank: 8
max_rounds: 2
max_local_epochs: 1
data_kinds: [folders]
data_roots: [{root}]
label_spaces: [node]
min_train_images: 4
backbones: ['{backbone.name}']
weights: ['{backbone.weights}']
precisions: [fp32]
devices: [cpu]
"""


def test_a_request_inside_all_rules_is_answered_as_without_a_policy(site, experiment, tmp_path):
    asked = experiment()
    text = EVERYTHING.format(root=tmp_path / "secret-place", backbone=asked.backbone)
    site.policy.write_text(text)
    shared = shared_of(asked)
    request = Request("train", "fed", 1, asked.to_json(), shared=shared)
    reply = Node(site, "fed").handle(request)
    assert reply.error is None
    free = Site("north", tmp_path / "free", data_dir=site.data_dir)
    other = Node(free, "fed").handle(request)
    assert tensors_sha256(reply.shared) == tensors_sha256(other.shared)
    allowed = Node(free, "fed").handle(join(asked)).statistics["backbone_sha256"]
    site.policy.write_text(f"backbone_sha256: ['{allowed}']")
    assert Node(site, "fed").handle(join(asked)).error is None


def test_the_noise_that_a_policy_demands_is_let_through(site, experiment):
    site.policy.write_text(
        "privacy_kinds: [local]\nmin_noise_multiplier: 2\nmax_clipping_norm: 0.5"
    )
    privacy = {"kind": "local", "noise_multiplier": 2.0, "clipping_norm": 0.5}
    assert Node(site, "fed").handle(join(experiment(privacy=privacy))).error is None
    # Where none is allowed, noise for show is, too.
    site.policy.write_text("privacy_kinds: [none, local]")
    privacy = {"kind": "local", "noise_from": "seed"}
    assert Node(site, "fed").handle(join(experiment(privacy=privacy))).error is None
    assert Node(site, "fed").handle(join(experiment())).error is None


def test_only_ranks_that_are_none_count_as_0(site, experiment):
    site.policy.write_text("max_rank: 0")
    ranks = {"vision_rank": "none", "text_rank": "none", "projection_rank": 8}
    reply = Node(site, "fed").handle(join(experiment(method=ranks)))
    assert "method.projection_rank = 8 (max_rank: 0)" in (reply.error or "")


def test_a_link_does_not_lead_out_of_the_allowed_folders(site, experiment, tmp_path):
    inside = tmp_path / "allowed"
    inside.mkdir()
    (inside / "ward").symlink_to(site.data_dir)
    site.policy.write_text(f"data_roots: [{inside}]")
    linked = Site("north", tmp_path / "state", data_dir=inside / "ward", policy=site.policy)
    assert "(data_roots)" in (Node(linked, "fed").handle(join(experiment())).error or "")
    site.policy.write_text(f"data_roots: [{inside}, {site.data_dir}]")
    assert Node(linked, "fed").handle(join(experiment())).error is None


def test_folders_that_a_server_names_must_be_allowed(site, experiment, tmp_path):
    site.policy.write_text(f"data_roots: [{tmp_path}]")
    free = Site("north", tmp_path / "state", policy=site.policy)
    data = {"kind": "dtd", "root": "/etc", "shots": 2}
    reply = Node(free, "fed").handle(join(experiment(data=data)))
    assert reply.error == "the site's policy refuses data.root (data_roots)"
    data |= {"root": str(tmp_path), "manifest": f"{tmp_path}/../../etc/passwd", "shots": None}
    reply = Node(free, "fed").handle(join(experiment(data=data)))
    assert reply.error == "the site's policy refuses data.manifest (data_roots)"


@pytest.mark.parametrize("kind", ["join", "train", "evaluate"])
def test_a_changed_policy_holds_from_the_next_request_on(site, experiment, kind):
    site.policy.write_text("max_rounds: 2")
    node, asked = Node(site, "fed"), experiment()
    request = Request(kind, "fed", int(kind != "join"), asked.to_json(), shared=shared_of(asked))
    assert node.handle(request).error is None
    site.policy.write_text("max_rounds: 1")
    assert "rounds = 2 (max_rounds: 1)" in (node.handle(request).error or "")
    site.policy.write_text("max_round")
    reply = node.handle(request)
    assert reply.error == "its data or state is unusable; its log says why"
    assert (reply.exit_code, reply.shared, reply.statistics) == (3, {}, {})
    site.policy.write_text("max_rounds: 2")
    assert node.handle(request).error is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("", "it must hold at least one line"),
        ("{}", "it must hold at least one line"),
        ("- methods", "it must hold at least one line"),
        ("max_rounds: 3\nmethods:\n", "methods has no value; give one, or remove the line"),
        ("max_ranks: 3", "max_ranks: unknown key; did you mean max_rank?"),
        ("max_rank: '3'", 'max_rank = "3": input should be a valid integer'),
        ("max_rank: -1", "max_rank = -1: input should be greater than or equal to 0"),
        ("max_rank: 3\nmax_rank: 300", "key 'max_rank' is given twice"),
        ("methods: []", "methods = []: list should have at least 1 item"),
        ("methods: [blendd]", "no such method; known are adaptformer, blend"),
        ("data_roots: [photos]", "must be an absolute path"),
        ("backbone_sha256: [abc]", "should match pattern"),
        ("methods: [blend", "policy.yaml: not valid YAML"),
        (b"\xff\xfe", "policy.yaml: not UTF-8 text"),
    ],
)
def test_a_wrong_policy_refuses_everything_and_the_log_says_why(
    site, experiment, text, reason, caplog
):
    if text is not None:
        site.policy.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SiteError) as caught:
        read_policy(site.policy)
    line = str(caught.value)
    assert line.startswith(f"policy {site.policy}: ")
    assert reason in line
    assert "\n" not in line
    assert line.endswith("the site refuses everything until it is mended")
    reply = Node(site, "fed").handle(join(experiment()))
    assert reply.error == "its data or state is unusable; its log says why"
    assert line in caplog.text


def test_the_server_reports_a_refusal_at_the_join(site, experiment, tmp_path):
    site.policy.write_text("methods: [fedotp]")
    nodes = LoopTransport({"north": Node(site, "fed")})
    coordinator = Coordinator(experiment(clients=1), nodes, tmp_path / "server", "fed", "loop")
    with pytest.raises(ConfigError) as caught:
        coordinator.run()
    told = "north: the site's policy refuses method.name = 'blend' (methods: fedotp)"
    assert str(caught.value) == told
    assert told in (tmp_path / "server" / "events.jsonl").read_text()


def test_node_config_names_the_policy_and_a_worker_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = Site.from_node_config({"client-name": "a", "state-dir": "/s", "policy": "p.yaml"})
    assert site.policy == tmp_path / "p.yaml"
    assert Site.from_json(site.to_json()) == site
    with pytest.raises(ConfigError, match="node config policy = 3: must be text"):
        Site.from_node_config({"client-name": "a", "state-dir": "/s", "policy": 3})


def test_the_documented_policy_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "sites.md").read_text()
    (block,) = [part for part in text.split("```yaml\n")[1:] if "methods:" in part]
    path = tmp_path / "policy.yaml"
    path.write_text(block.split("```")[0])
    policy = read_policy(path)
    assert set(policy.model_fields_set) == set(type(policy).model_fields)
    assert all(f"`{rule}`" in text for rule in type(policy).model_fields)


def test_every_key_of_the_node_config_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "sites.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in text] == []
