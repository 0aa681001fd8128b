"""One client's requests: what is kept, what is sent, what is refused."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import create_model

import client.node
from blend_core.backbone import Backbone
from blend_core.config import StateConfig
from blend_core.messages import Request
from blend_core.methods import build_method
from blend_core.methods.base import snapshot
from blend_core.settings import load_experiment
from blend_core.state import tensors_sha256
from client.node import Node
from client.site import Site


@pytest.fixture
def setting(tiny_experiment, tower, tmp_path):
    """(experiment, its initial shared tensors, function that makes a node)."""
    experiment = tiny_experiment(backbone=tower("tower_a").model_dump(), rounds=20)
    described = Backbone.describe(experiment.backbone)
    method = build_method(experiment.method, described, experiment.seed)

    def node(index: int = 0, federation: str = "fed") -> Node:
        name = f"client-{index:02d}"
        return Node(Site(name, tmp_path / name, partition=index, verbose_errors=True), federation)

    return experiment, snapshot(method.shared()), node


def ask(experiment, shared, kind="train", round=1, **fields) -> Request:
    return Request(kind, "fed", round, experiment.to_json(), shared=shared, **fields)


def test_training_changes_every_tensor_and_leaves_the_global_generators_alone(setting):
    experiment, shared, node = setting
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    reply = node().handle(ask(experiment, shared))
    assert reply.error is None
    assert reply.train_images > 0
    assert set(reply.shared) == set(shared)
    assert all(np.abs(reply.shared[name] - shared[name]).max() > 0 for name in shared)
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])


def test_a_round_done_again_gives_the_same_bytes_in_this_and_in_another_process(setting):
    experiment, shared, node = setting
    first = node()
    one = first.handle(ask(experiment, shared))
    two = first.handle(ask(experiment, one.shared, round=2, last_round=1))
    again = first.handle(ask(experiment, one.shared, round=2, last_round=1))
    fresh = node().handle(ask(experiment, one.shared, round=2, last_round=1))
    for other in (again, fresh):
        assert tensors_sha256(other.shared) == tensors_sha256(two.shared)
        assert other.statistics["private_sha256"] == two.statistics["private_sha256"]
    assert two.statistics["private_sha256"] != one.statistics["private_sha256"]


def test_clients_differ_and_other_seeds_differ(setting, tiny_experiment, tower):
    experiment, shared, node = setting
    one, two = (node(i).handle(ask(experiment, shared)) for i in (0, 1))
    assert tensors_sha256(one.shared) != tensors_sha256(two.shared)
    assert one.statistics["private_sha256"] != two.statistics["private_sha256"]
    other_seed = experiment.model_copy(update={"seed": 2})
    data = experiment.data.model_copy(update={"partition_seed": 1, "fewshot_seed": 1})
    other_seed = other_seed.model_copy(update={"data": data})
    other = node().handle(ask(other_seed, shared))
    assert tensors_sha256(other.shared) != tensors_sha256(one.shared)


def test_a_never_sampled_client_is_evaluated_with_its_initial_private_part(setting):
    experiment, shared, node = setting
    reply = node(1).handle(ask(experiment, shared, kind="evaluate", round=9))
    assert reply.error is None
    assert reply.shared == {}
    counts = reply.statistics["counts"]
    assert counts["base"][1] == 20
    assert counts["novel"][1] == 20
    assert 0 < counts["local"][1] <= 20


def test_evaluation_rides_on_the_train_message_and_sees_the_received_model(setting):
    experiment, shared, node = setting
    subject = node()
    alone = subject.handle(ask(experiment, shared, kind="evaluate", round=1))
    riding = subject.handle(ask(experiment, shared, evaluate=True))
    assert riding.statistics["counts"] == alone.statistics["counts"]
    assert "counts" not in subject.handle(ask(experiment, shared)).statistics


def test_lost_private_state_is_an_error_not_a_cold_start(setting, tmp_path):
    experiment, shared, node = setting
    reply = node().handle(ask(experiment, shared, round=5, last_round=4))
    assert reply.exit_code == 3
    assert "private state of round 4 is missing" in reply.error
    assert "\n" not in reply.error


def test_a_damaged_private_state_is_named(setting, tmp_path):
    experiment, shared, node = setting
    first = node()
    first.handle(ask(experiment, shared))
    path = next(first.generations.folder.glob("round-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    reply = node().handle(ask(experiment, shared, round=2, last_round=1))
    assert reply.exit_code == 3
    assert path.name in reply.error


@pytest.mark.parametrize(("left", "used"), [((), 0), ((1,), 1)])
def test_a_cold_start_is_allowed_only_by_the_policy_and_says_what_it_used(setting, left, used):
    experiment, shared, node = setting
    site = node()
    for round in (1, 2):
        assert site.handle(ask(experiment, shared, round=round)).error is None
    for path in site.generations.folder.glob("round-*"):
        if path != site.generations.path(1) or not left:
            path.unlink()
    failed = site.handle(ask(experiment, shared, round=3, last_round=2))
    assert (failed.exit_code, failed.statistics) == (3, {"state": "lost"})

    allowed = experiment.model_copy(update={"state": StateConfig(on_missing="cold-start")})
    reply = site.handle(ask(allowed, shared, round=3, last_round=2))
    assert reply.error is None
    assert reply.statistics["cold_start"] == {"lost": 2, "used": used}
    # Once there is a state of a round that counted, nothing is lost any more.
    assert "cold_start" not in site.handle(ask(allowed, shared, round=4, last_round=3)).statistics


def test_a_damaged_state_may_be_replaced_by_the_one_before_if_the_policy_says_so(setting):
    experiment, shared, node = setting
    site = node()
    for round in (1, 2):
        site.handle(ask(experiment, shared, round=round))
    site.generations.path(2).write_bytes(b"")
    failed = site.handle(ask(experiment, shared, round=3, last_round=2))
    assert failed.statistics == {"state": "lost"}
    allowed = experiment.model_copy(update={"state": StateConfig(on_missing="cold-start")})
    reply = site.handle(ask(allowed, shared, round=3, last_round=2))
    assert reply.statistics["cold_start"] == {"lost": 2, "used": 1}


def test_a_cold_start_is_told_until_a_reply_counts(setting):
    """The reply of the round may be late or refused."""
    experiment, shared, node = setting
    allowed = experiment.model_copy(update={"state": StateConfig(on_missing="cold-start")})
    site = node()
    for round in (1, 2):
        site.handle(ask(allowed, shared, round=round, last_round=round - 1))
    for path in site.generations.folder.glob("round-*"):
        path.unlink()
    told = {"lost": 2, "used": 0}
    for round in (3, 4):  # The server has heard neither.
        reply = site.handle(ask(allowed, shared, round=round, last_round=2))
        assert reply.statistics["cold_start"] == told
    # By another process, and in an evaluation, too; with the policy changed it is an error again.
    reply = node().handle(ask(allowed, shared, kind="evaluate", round=5, last_round=2))
    assert reply.statistics["cold_start"] == told
    failed = node().handle(ask(experiment, shared, round=5, last_round=2))
    assert (failed.exit_code, failed.statistics) == (3, {"state": "lost"})
    assert "private state of round 2 was lost in round 4; restore" in (failed.error or "")
    reply = node().handle(ask(allowed, shared, round=5, last_round=4))
    assert "cold_start" not in reply.statistics


@pytest.mark.parametrize("policy", ["fail", "cold-start"])
@pytest.mark.parametrize("counted", [0, 1])
def test_damage_to_a_round_that_did_not_count_ends_nothing_and_is_told(setting, policy, counted):
    experiment, shared, node = setting
    experiment = experiment.model_copy(update={"state": StateConfig(on_missing=policy)})
    site = node()
    for round in range(1, counted + 2):
        site.handle(ask(experiment, shared, round=round))
    path = site.generations.path(counted + 1)
    path.write_bytes(b"")
    reply = site.handle(ask(experiment, shared, round=counted + 2, last_round=counted))
    assert reply.error is None
    assert reply.statistics["cold_start"] == {"lost": counted + 1, "used": counted}
    # The same bytes as without the damaged file.
    other = node(federation="another")
    for round in range(1, counted + 1):
        other.handle(ask(experiment, shared, round=round))
    expected = other.handle(ask(experiment, shared, round=counted + 2, last_round=counted))
    assert expected.statistics.get("cold_start") is None
    assert tensors_sha256(reply.shared) == tensors_sha256(expected.shared)


LOADING = (
    "loading; set data.image_memory (of this site alone: image-memory) to fewer GiB, or choose a "
    "smaller backbone"
)
EXHAUSTED = {
    "local_update": "training; set train.batch_size below 16, train.precision=bf16 or a smaller "
    "backbone.text_chunk",
    "evaluate": "evaluation; set evaluation.batch_size below 100 or a smaller backbone.text_chunk",
    "load_client_data": LOADING,
    "_backbone": LOADING,
}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_site_that_runs_out_of_memory_says_what_to_set_and_can_do_the_round_again(
    setting, monkeypatch, error
):
    experiment, shared, node = setting
    site = node()
    expected = node(federation="another").handle(ask(experiment, shared))

    def exhausted(*arguments: object) -> None:
        raise error

    for where, what in EXHAUSTED.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"client.node.{where}", exhausted)
            site._loaded = site._loaded if where in ("local_update", "evaluate") else None
            reply = site.handle(ask(experiment, shared, evaluate=True))
        assert (reply.error, reply.exit_code) == (f"out of memory in {what}", 1)
    again = site.handle(ask(experiment, shared))
    assert tensors_sha256(again.shared) == tensors_sha256(expected.shared)


def test_private_state_of_another_method_is_refused(setting):
    experiment, shared, node = setting
    node().handle(ask(experiment, shared))
    method = experiment.method.model_copy(update={"gamma": 0.1})
    other = experiment.model_copy(update={"method": method})
    reply = node().handle(ask(other, shared, round=2, last_round=1))
    assert "made with another settings of the method" in reply.error


def test_private_values_leave_the_site_in_no_reply(setting):
    """A canary written into the private tensors must not be found in any message."""
    experiment, shared, node = setting
    # Lambda 0 leaves the projection untrained, so the canary is still there in the train reply.
    method = experiment.method.model_copy(update={"lambda_": 0.0})
    experiment = experiment.model_copy(update={"method": method})
    subject = node()
    subject.handle(ask(experiment, shared))
    canary = np.float32(1.2345678e17)
    _, private, header = subject.generations.newest_before(2)
    private = {name: np.full_like(value, canary) for name, value in private.items()}
    subject.generations.save(1, private, header)
    requests = [
        ask(experiment, shared, kind="join", round=0),
        ask(experiment, shared, round=2, last_round=1, evaluate=True),
        ask(experiment, shared, kind="evaluate", round=3, last_round=2),
    ]
    for request in requests:
        reply = subject.handle(request)
        assert reply.error is None
        header_text, vector = reply.pack()
        assert canary not in vector
        assert "1.2345" not in header_text
        assert not set(private) & set(reply.shared)
    _, kept, _ = subject.generations.newest_before(3)
    assert all((value == canary).all() for value in kept.values())


def test_a_reply_names_no_class_and_no_path(setting, tmp_path):
    experiment, shared, node = setting
    subject = node()
    for request in (ask(experiment, shared, kind="join", round=0), ask(experiment, shared)):
        text = json.dumps(subject.handle(request).statistics)
        names = subject._load(request).data.base_names
        assert not any(name in text for name in names)
        assert str(tmp_path) not in text


def test_a_wrong_setting_comes_back_as_one_line(setting):
    experiment, _, node = setting
    data = experiment.to_json()
    data["method"]["vision_layers"] = [7]
    reply = node().handle(Request("join", "fed", 0, data))
    assert reply.exit_code == 2
    assert "method.vision_layers = [7]" in reply.error


def test_a_client_with_one_image_trains(setting, tiny_experiment, tower):
    experiment = tiny_experiment(
        backbone=tower("tower_a").model_dump(), data={"shots": 1}, clients=20
    )
    _, shared, node = setting
    replies = [node(i).handle(ask(experiment, shared)) for i in range(20)]
    assert [r.error for r in replies] == [None] * 20
    assert 1 in {r.train_images for r in replies}


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        (["Secret_Disease", "secret disease"], "its data is unusable (E09)"),
        (["secret " * 20, "flu"], "its data is unusable (E11)"),
        (["secret"], "its data is unusable (E07)"),
    ],
)
def test_a_sites_error_does_not_tell_the_server_its_class_names_or_paths(
    tmp_path, caplog, classes, told
):
    """With a folder of its own; a run on one machine shows everything."""
    data = tmp_path / "ward-7"
    for name in classes:
        (data / "train" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(data / "train" / name / "a.png")
    experiment = load_experiment("quickstart", ["data.kind=folders", "clients=1"])
    join = Request("join", "fed", 0, experiment.to_json())
    reply = Node(Site("hospital", tmp_path / "state", data_dir=data), "fed").handle(join)
    assert reply.exit_code == 3
    assert reply.error == f"{told}; its log says why"
    assert classes[0].strip()[:70] in caplog.text
    mine = Site("hospital", tmp_path / "state", data_dir=data, verbose_errors=True)
    assert classes[0].strip()[:70] in Node(mine, "fed").handle(join).error


def test_a_holdout_is_drawn_once_and_its_images_are_read_once(tmp_path, monkeypatch):
    data = tmp_path / "ward-7"
    for name in ("flu", "cold"):
        (data / "train" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 40), (number, len(name), 9)).save(
                data / f"train/{name}/{number}.png"
            )
    loads: list[object] = []
    real = client.node.load_client_data
    monkeypatch.setattr(
        client.node, "load_client_data", lambda *given: loads.append(given) or real(*given)
    )
    settings = ["data.kind=folders", "clients=1", "data.holdout=0.25"]
    join = Request("join", "fed", 0, load_experiment("quickstart", settings).to_json())
    node = Node(Site("hospital", tmp_path / "state", data_dir=data), "fed")
    for _ in range(2):
        assert node.handle(join).error is None
    assert len(loads) == 1
    held = tmp_path / "state" / "holdout" / "hospital.json"
    held.write_bytes(held.read_bytes() + b"\n")  # Another run of the site holds out more.
    assert node.handle(join).error is None
    assert len(loads) == 2


def test_a_folder_that_was_wrong_for_a_moment_is_read_anew_when_it_is_right_again(tmp_path):
    """A renamed folder has the times and inodes that it had before."""
    data = tmp_path / "ward-7"
    for name in ("alpha", "flu"):
        (data / "train" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (len(name), 9, 9)).save(data / "train" / name / "1.png")
    experiment = load_experiment("quickstart", ["data.kind=folders", "clients=1"])
    join = Request("join", "fed", 0, experiment.to_json())
    node = Node(Site("hospital", tmp_path / "state", data_dir=data), "fed")
    assert node.handle(join).error is None
    long = "zeta " * 40
    (data / "train" / "alpha").rename(data / "train" / long)
    assert "E11" in (node.handle(join).error or "")
    (data / "train" / long).rename(data / "train" / "alpha")
    assert node.handle(join).error is None
    loaded = node._loaded[1]
    assert loaded.data.base_names == ("alpha", "flu")
    reds = [int(image.float().mean((1, 2))[0].round()) for image in loaded.data.train.images]
    labels = loaded.data.train.labels.tolist()
    assert {r: loaded.data.base_names[n] for r, n in zip(reds, labels, strict=True)} == {
        5: "alpha",
        3: "flu",
    }


def test_a_site_can_go_back_as_far_as_the_server(setting):
    experiment, shared, node = setting
    site = node()
    for round in range(1, 7):
        site.handle(ask(experiment, shared, round=round))
    # The server died in round 6 and has checkpoints 3, 4 and 5, of which only the oldest is whole.
    assert site.generations.rounds() == [3, 4, 5, 6]
    server = experiment.server.model_copy(update={"keep_checkpoints": 5})
    more = experiment.model_copy(update={"server": server})
    for round in range(7, 12):
        site.handle(ask(more, shared, round=round))
    assert site.generations.rounds() == [6, 7, 8, 9, 10, 11]


def test_a_gpu_that_is_not_there_is_named_with_how_many_there_are(setting):
    experiment, shared, node = setting
    train = experiment.train.model_copy(update={"device": "cuda:77"})
    reply = node().handle(ask(experiment.model_copy(update={"train": train}), shared))
    assert reply.exit_code == 2
    assert re.match(r"train\.device = 'cuda:77': \d+ CUDA devices here; use cpu", reply.error)


def test_a_setting_that_a_later_version_adds_keeps_the_state(setting, monkeypatch):
    experiment, shared, node = setting
    site = node()
    first = site.handle(ask(experiment, shared))
    header = site.generations.load(1)[1]
    method = experiment.method.model_copy()
    # A class with one field more, as a later version may have it.
    kind = create_model("Later", __base__=type(method), later=(float, 0.5))
    later = kind(**method.model_dump())
    digest = hashlib.sha256(later.model_dump_json(exclude_defaults=True).encode()).hexdigest()
    assert header["settings of the method"] == digest
    assert first.error is None


def test_a_crash_tells_the_server_its_kind_only(tmp_path, monkeypatch):
    def crash(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("client.node.load_client_data", crash)
    experiment = load_experiment("quickstart", ["data.kind=folders", "clients=1"])
    node = Node(Site("hospital", tmp_path / "state", data_dir=tmp_path), "fed")
    reply = node.handle(Request("join", "fed", 0, experiment.to_json()))
    assert reply.error == "it failed (KeyError); its log says why"


@pytest.mark.parametrize(
    ("kind", "round", "last"),
    [("train", 0, 0), ("train", -5, 0), ("train", 21, 0), ("evaluate", 22, 0), ("train", 1, 1)],
)
def test_a_round_that_no_run_has_is_refused_and_changes_no_generation(setting, kind, round, last):
    experiment, shared, node = setting
    site = node()
    assert site.handle(ask(experiment, shared)).error is None
    before = sorted(p.name for p in site.generations.folder.iterdir())
    reply = site.handle(ask(experiment, shared, kind, round, last_round=last))
    assert f"asked to {kind} in round {round}; expected" in (reply.error or "")
    assert sorted(p.name for p in site.generations.folder.iterdir()) == before


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_values_that_are_not_finite_are_named_and_not_blamed_on_the_site(setting, kind):
    experiment, shared, node = setting
    name = sorted(shared)[0]
    spoiled = {**shared, name: np.full_like(shared[name], np.nan)}
    reply = node().handle(ask(experiment, spoiled, kind))
    assert f"not finite: {name}" in (reply.error or "")
    payload = {"experts": np.full((1, 2), np.inf, np.float32)}
    reply = node().handle(ask(experiment, shared, kind, payload=payload))
    assert "not finite: experts" in (reply.error or "")
