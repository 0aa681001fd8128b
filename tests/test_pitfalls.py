"""Mistakes of the field's released code (PROTOCOL 8) in training, averaging and measuring.

One test per pitfall, which fails if this code makes the mistake. Those of the data are in
blend_core/data/test_pitfalls.py.
"""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import ROWS
from rich.console import Console

from blend_core import __version__
from blend_core.config import TrainConfig, parse_experiment
from blend_core.data import ClientData, Labelled, client_names
from blend_core.errors import ConfigError
from blend_core.evaluation import evaluate
from blend_core.messages import Reply, Request
from blend_core.methods import build_method, config_class
from blend_core.methods.base import Method, restore, snapshot
from blend_core.settings import experiment_from_run_config, load_experiment
from blend_core.state import tensors_sha256
from blend_core.training import local_update
from client.node import Node
from client.site import local_site
from deploy.loop import LoopTransport, run_loop
from deploy.table import print_results
from server.strategy import Coordinator

NAMES = ("red fox", "bus", "snow_leopard", "F-16A")
GROUPS = ("local", "base", "novel")
TINY: dict[str, Any] = {
    "seed": 0,
    "rounds": 1,
    "clients": 2,
    "method": {"name": "blend", **ROWS["blend"].small},
    "data": {"shots": 2, "test_per_class": 1},
}


def client_data(images: int, tests: int = 0, seed: int = 0) -> ClientData:
    """A client with random pictures of the fixture tower's size."""
    draws = torch.Generator().manual_seed(seed)

    def part(count: int) -> Labelled:
        pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=draws, dtype=torch.uint8)
        return Labelled.of(list(pixels), [i % len(NAMES) for i in range(count)])

    return ClientData(NAMES, (), part(images), part(tests), part(0))


@pytest.fixture
def method(backbone) -> Callable[..., Method]:
    """A fresh method on a small tower."""

    def build(name: str = "blend", seed: int = 0) -> Method:
        config = config_class(name)(name=name, **ROWS[name].small)
        return build_method(config, backbone("tower_a"), seed)

    return build


def trained(method: Method, data: ClientData, round: int = 1, **settings: Any) -> dict[str, Any]:
    config = TrainConfig(**{"batch_size": 4, "lr": 0.01, **settings})
    classes = method.tokenize(NAMES, "a photo of a {}.")
    return local_update(method, data, classes, config, 0, "client-00", round, 4)


def weights(method: Method) -> dict[str, np.ndarray]:
    return snapshot({**method.shared(), **method.private()})


def random_weights(method: Method, seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    values = weights(method).items()
    return {n: draws.normal(size=value.shape).astype(np.float32) for n, value in values}


class Scripted:
    """Clients that answer at once: (client, request) -> its counts; each adds 1 per image."""

    def __init__(self, images: Mapping[str, int], counts: Callable[[str, Request], Any]) -> None:
        self.images, self.counts = images, counts

    def join(self, request: Request, timeout: float) -> Iterator[Reply]:
        for _, reply in self.ask(dict.fromkeys(self.images, request), timeout):
            yield reply

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        for client, request in requests.items():
            n = self.images[client]
            shared = {k: v + np.float32(n) for k, v in request.shared.items()}
            statistics = {"counts": self.counts(client, request)}
            reply = Reply(request.kind, request.round, client, __version__, n, statistics)
            reply.shared = shared if request.kind == "train" else {}
            yield client, reply


def same(right: int, total: int) -> dict[str, list[int]]:
    return {group: [right, total] for group in GROUPS}


@pytest.fixture
def scripted(tower, tmp_path):
    """Run the real coordinator with scripted clients: its results and the coordinator."""

    def run(
        images: Mapping[str, int], counts: Callable[[str, Request], Any], **changes: Any
    ) -> tuple[dict[str, Any], Coordinator]:
        whole = {**TINY, "backbone": tower("tower_a").model_dump(), "data": {"kind": "folders"}}
        whole |= {"clients": len(images), "rounds": 2, **changes}
        whole["server"] = {"max_change": 1e6, **changes.get("server", {})}
        experiment = parse_experiment(whole)
        coordinator = Coordinator(experiment, Scripted(images, counts), tmp_path, "fed", "scripted")
        coordinator.run()
        return json.loads((tmp_path / "results.json").read_text()), coordinator

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small run of the built-in benchmark."""
    out = tmp_path_factory.mktemp("pitfalls") / "run"
    run_loop(parse_experiment(TINY), out, "fed")
    return out


def test_p03_text_features_are_never_those_of_earlier_weights_or_another_client(method):
    data = client_data(1, tests=48)
    one = method("pfedmma")
    classes = one.tokenize(NAMES, "a photo of a {}.")
    states = [random_weights(one, seed) for seed in (1, 2)]

    def measured(model: Method, state: dict[str, np.ndarray]) -> list[int]:
        restore({**model.shared(), **model.private()}, state)
        return evaluate(model, data, classes, None, 16)["base"]

    fresh = [measured(method("pfedmma"), state) for state in states]
    assert fresh[0] != fresh[1]
    assert [measured(one, state) for state in (*states, *states)] == fresh * 2


def test_p04_the_result_is_the_last_round_and_not_the_best_on_test_images(scripted):
    # Asked in round r, a client measures the model after r - 1 rounds; the last is number 4.
    right = {0: 0, 1: 1, 2: 9, 3: 5, 4: 3}
    results, _ = scripted({"a": 1}, lambda _, request: same(right[request.round], 10), rounds=3)
    assert (results["final"]["per"], results["final"]["model_after_round"]) == (30.0, 3)
    assert results["best_on_test"] is None


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"zero-shot"}))
def test_p05_every_method_trains_and_averages_over_the_same_clients(scripted, name):
    everyone = {f"client-{i:02d}": 1 for i in range(10)}
    method = {"name": name, **ROWS[name].small}
    results, _ = scripted(everyone, lambda *_: same(1, 2), rounds=1, method=method)
    assert [row["client"] for row in results["rounds"][0]["clients"]] == list(everyone)
    for part in ("zero_shot", "final"):
        assert list(results[part]["counts"]) == list(everyone)


def test_p12_seed_0_is_a_seed(method):
    experiment = parse_experiment(
        {"seed": 5, "data": {"fewshot_seed": 0, "partition_seed": 0}, "clients": 2}
    )
    assert (experiment.fewshot_seed, experiment.partition_seed) == (0, 0)
    assert parse_experiment({"seed": 0}).partition_seed == 0
    first, again, other = (tensors_sha256(weights(method(seed=seed))) for seed in (0, 0, 1))
    assert first == again != other


def test_p13_the_text_false_is_not_true():
    with pytest.raises(ConfigError, match=r"server\.aggregate_stale = \"False\""):
        experiment_from_run_config({"server.aggregate_stale": "False"})
    given = load_experiment("quickstart", ["server.aggregate_stale=False"])
    assert given.server.aggregate_stale is False
    with pytest.raises(ConfigError, match="full_first_round"):
        load_experiment("quickstart", ["server.full_first_round='False'"])


def test_p15_only_the_participants_of_a_round_are_averaged(scripted):
    images = {"a": 2, "b": 6}
    server = {"fraction": 0.5, "full_first_round": True}
    results, coordinator = scripted(images, lambda *_: same(1, 2), server=server)
    (asked,) = (row["client"] for row in results["rounds"][1]["clients"])
    first = coordinator.checkpoints.load(1).shared
    second = coordinator.checkpoints.load(2).shared
    assert sorted(first) == sorted(coordinator.method.shared())
    for name, value in second.items():
        # A client adds its number of images; absent ones, with stale weights, would add less.
        np.testing.assert_allclose(value - first[name], images[asked], rtol=1e-5)


def test_p16_what_a_client_uploaded_is_not_overwritten_by_later_training(tmp_path):
    experiment = parse_experiment({**TINY, "rounds": 2})
    names = client_names(experiment) or []
    sites = [local_site(experiment, name, i, tmp_path) for i, name in enumerate(names)]
    transport = LoopTransport({site.name: Node(site, "fed") for site in sites})
    join = Request("join", "fed", 0, experiment.to_json(), evaluate=True)
    assert all(reply.error is None for reply in transport.join(join, 60.0))
    node = transport.nodes[names[0]]
    assert node._loaded is not None
    shared = snapshot(node._loaded[1].method.shared())
    train = Request("train", "fed", 1, experiment.to_json(), shared=shared)
    uploads, hashes = {}, {}
    for client, reply in transport.ask(dict.fromkeys(names, train), 60.0):
        assert reply.error is None
        uploads[client], hashes[client] = reply.shared, tensors_sha256(reply.shared)
    assert len(set(hashes.values())) == 2
    # Nor by the same client's next round, for servers that keep uploads.
    again = Request("train", "fed", 2, experiment.to_json(), last_round=1, shared=uploads[names[1]])
    assert all(reply.error is None for _, reply in transport.ask({names[0]: again}, 60.0))
    assert {client: tensors_sha256(upload) for client, upload in uploads.items()} == hashes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_p17_no_moment_and_no_rate_is_carried_from_client_to_client(method, optimizer):
    settings = {"optimizer": optimizer, "schedule": "cosine", "momentum": 0.9}
    other, own = client_data(8, seed=1), client_data(8, seed=2)
    alone, shared = method(), method()
    start = weights(shared)
    for round in (1, 2, 2):
        trained(shared, other, round, **settings)
    restore({**shared.shared(), **shared.private()}, start)
    trained(shared, own, 3, **settings)
    trained(alone, own, 3, **settings)
    assert (
        tensors_sha256(weights(shared)) == tensors_sha256(weights(alone)) != (tensors_sha256(start))
    )


def test_p18_the_last_smaller_batch_is_trained_unless_the_paper_mode_asks_otherwise(method):
    for images, kept, dropped in ((5, 2, 1), (8, 2, 2), (3, 1, 1)):
        assert trained(method(), client_data(images))["steps"] == kept
        paper = trained(method(), client_data(images), drop_last="if-larger")
        assert paper["steps"] == dropped
    # What the fifth image teaches must be in the result.
    whole, cut = method(), method()
    trained(whole, client_data(5))
    trained(cut, client_data(5), drop_last="if-larger")
    assert tensors_sha256(weights(whole)) != tensors_sha256(weights(cut))


def test_p20_sizes_of_clients_and_the_image_weighted_mean_stand_beside_the_mean(scripted, tmp_path):
    counts = {"big": same(90, 100), "one": same(0, 10)}
    results, _ = scripted({"big": 89, "one": 1}, lambda client, _: counts[client])
    output = io.StringIO()
    print_results(results, tmp_path, Console(file=output, width=80, color_system=None))
    lines = [line.split("│")[1:-1] for line in output.getvalue().splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    # (90 + 0) / 2, and 90 of 110.
    assert [row[1] for row in rows if row[0] == "mean"] == ["45.0", "45.0"]
    assert [row[1] for row in rows if row[0] == "image-weighted"] == ["81.8", "81.8"]
    assert [row[:2] for row in rows if len(row) == 4] == [["big", "89"], ["one", "1"]]


def test_p21_zero_shot_is_shown_on_the_images_of_the_trained_rows_and_as_published(finished):
    results = json.loads((finished / "results.json").read_text())
    zero_shot, counts = results["zero_shot"], results["zero_shot"]["counts"].values()
    for client, found in results["final"]["counts"].items():
        before = zero_shot["counts"][client]
        assert [found[group][1] for group in GROUPS] == [before[group][1] for group in GROUPS]
    own = [100 * c["local"][0] / c["local"][1] for c in counts]
    assert zero_shot["per"] == pytest.approx(sum(own) / len(own))
    # All base images, also of classes that a client does not have.
    assert all(c["local"][1] < c["base"][1] for c in counts)
    whole = 100 * sum(c["base"][0] for c in counts) / sum(c["base"][1] for c in counts)
    assert zero_shot["as_published"]["per"] == pytest.approx(whole)


def test_p29_nothing_of_an_evaluation_stays_in_memory(method):
    one, data = method(), client_data(1, tests=12)
    classes = one.tokenize(NAMES, "a photo of a {}.")

    def tensors_after(evaluations: int) -> int:
        for _ in range(evaluations):
            evaluate(one, data, classes, None, 4)
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    tensors_after(1)
    assert tensors_after(1) == tensors_after(5)
