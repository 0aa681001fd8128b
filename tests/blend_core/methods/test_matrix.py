"""Every method, the same checks (METHODS section 17). A new method: one row in matrix.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import ROWS, VIT_B, VIT_L
from support import read_fixture

from blend_core.backbone import Backbone, Classes
from blend_core.config import BackboneConfig, Experiment, TrainConfig
from blend_core.data import ClientData, Labelled, client_names
from blend_core.errors import ConfigError
from blend_core.messages import Reply, Request, tensor_bytes
from blend_core.methods import BUILT_IN, build_method, config_class
from blend_core.methods.base import Method, restore, snapshot
from blend_core.randomness import torch_generator
from blend_core.state import Generations, tensors_sha256
from blend_core.training import local_update
from client.node import Node
from client.site import local_site
from deploy.loop import LoopTransport, run_loop
from server.aggregation import weighted_mean
from server.strategy import Coordinator

every_method = pytest.mark.parametrize("name", sorted(ROWS))
trained_method = pytest.mark.parametrize("name", sorted(set(ROWS) - {"zero-shot"}))


def config_of(name: str, **changes: Any):
    return config_class(name)(name=name, **{**ROWS[name].small, **changes})


def randomised(method: Method, seed: int) -> Method:
    """Fill every tensor with small random values, up-projections included."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {**method.shared(), **method.private()}.values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draws))
    return method


def values(method: Method) -> dict[str, np.ndarray]:
    return snapshot({**method.shared(), **method.private()})


@pytest.fixture
def small(backbone):
    """name -> (method on the fixture tower, classes, images, labels)."""
    meta, arrays = read_fixture("zeroshot")

    def build(name: str, seed: int = 0) -> tuple[Method, Classes, torch.Tensor, torch.Tensor]:
        method = build_method(config_of(name), backbone("tower_a"), seed)
        classes = method.tokenize(meta["class_names"], "a photo of a {}.")
        images = torch.from_numpy(arrays["in/images"])
        return method, classes, images, torch.arange(len(images)) % len(meta["class_names"])

    return build


def client_data(images: int, names: int = 4) -> ClientData:
    """A client with random pictures of the fixture tower's size."""
    draws = torch.Generator().manual_seed(images)

    def part(count: int) -> Labelled:
        pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=draws, dtype=torch.uint8)
        return Labelled.of(list(pixels), [i % names for i in range(count)])

    base = ("red fox", "bus", "snow_leopard", "F-16A")[:names]
    return ClientData(base, ("school bus", "tiger_cat"), part(images), part(4), part(0))


def test_every_built_in_method_has_a_row():
    assert sorted(ROWS) == sorted(BUILT_IN)


# Counts and sets


@pytest.mark.parametrize("model", ["ViT-B-16-quickgelu", "ViT-L-14-quickgelu"])
@every_method
def test_parameters_and_bytes_equal_the_closed_formulas(name, model):
    described = Backbone.describe(BackboneConfig(name=model, weights="openai"))
    method = build_method(config_class(name)(name=name), described, 0)
    row, tower = ROWS[name], VIT_B if "B-16" in model else VIT_L
    expected = (row.shared(tower), row.private(tower))
    counts = method.parameter_counts()
    assert (counts["shared"], counts["private"]) == expected
    assert counts["trainable"] == sum(expected)
    header = 128 if expected[0] else 0
    assert tensor_bytes(snapshot(method.shared())) == 4 * expected[0] + header
    if tower is VIT_B:
        assert expected == row.table


@every_method
def test_sets_are_disjoint_complete_and_stable(name, small):
    method, *_ = small(name)
    shared, private = method.shared(), method.private()
    assert not set(shared) & set(private)
    owned = {id(p) for p in (*shared.values(), *private.values())}
    assert owned == {id(p) for p in method.parameters()}
    frozen = {id(p) for p in method.backbone.model.parameters()}
    assert not frozen & owned
    again, *_ = small(name, seed=1)
    assert list(shared) == list(again.shared()) == sorted(shared)
    assert list(private) == list(again.private()) == sorted(private)


@every_method
def test_initial_values_depend_on_the_seed_alone_and_need_no_weights(name, small, tower):
    method, *_ = small(name, seed=0)
    described = Backbone.describe(tower("tower_a"))
    on_server = build_method(config_of(name), described, 0)
    assert tensors_sha256(values(on_server)) == tensors_sha256(values(method))
    other, *_ = small(name, seed=1)
    drawn = [n for n, v in values(method).items() if v.any()]
    assert all((values(other)[n] != values(method)[n]).any() for n in drawn if "bias" not in n)
    if name not in ("zero-shot",):
        assert drawn


@every_method
def test_saved_and_loaded_tensors_are_bit_equal(name, small, tmp_path):
    method, *_ = small(name)
    before = values(randomised(method, 3))
    Generations(tmp_path).save(1, before, {"method": name})
    other, *_ = small(name, seed=9)
    loaded, _ = Generations(tmp_path).load(1)
    restore({**other.shared(), **other.private()}, loaded)
    assert tensors_sha256(values(other)) == tensors_sha256(before)


@trained_method
def test_snapshots_never_alias_the_live_model(name, small):
    """X8: on a CPU the released loop's saved client tensors are the live model's."""
    method, *_ = small(name)
    taken = values(method)
    kept = {n: v.copy() for n, v in taken.items()}
    with torch.no_grad():
        for tensor in method.parameters():
            tensor.add_(1.0)
    assert all((taken[n] == kept[n]).all() for n in kept)
    restore({**method.shared(), **method.private()}, kept)
    with torch.no_grad():
        next(method.parameters()).add_(1.0)
    assert all((taken[n] == kept[n]).all() for n in kept)


# Scores


@every_method
def test_switching_to_new_classes_changes_text_constants_alone(name, small):
    method, classes, images, _ = small(name)
    randomised(method, 5)
    before = values(method)
    old = method.logits(images, classes).detach()
    new = method.tokenize(["school bus", "tiger_cat"], "a photo of a {}.")
    assert method.logits(images, new).shape == (len(images), 2)
    torch.testing.assert_close(method.logits(images, classes).detach(), old, atol=0, rtol=0)
    assert tensors_sha256(values(method)) == tensors_sha256(before)


@pytest.mark.parametrize("name", sorted(n for n in ROWS if ROWS[n].private_text))
def test_two_clients_get_their_own_text_features_one_after_the_other(name, small):
    """X1: the released caches keep the first client's text features for everybody."""
    method, classes, *_ = small(name)
    mine, yours = snapshot(randomised(method, 1).private()), None
    first = method.text_features(classes).detach()
    method, *_ = small(name)
    yours = snapshot(randomised(method, 2).private())
    restore(method.shared(), snapshot(randomised(small(name)[0], 1).shared()))
    assert (method.text_features(classes) - first).abs().max() > 1e-3
    restore(method.private(), mine)
    torch.testing.assert_close(method.text_features(classes).detach(), first, atol=0, rtol=0)
    restore(method.private(), yours)
    assert (method.text_features(classes) - first).abs().max() > 1e-3


# bfloat16 has 8 bits: features of small random towers differ by up to 2 % of their norm.
BF16 = 0.02


@every_method
def test_bf16_stays_near_fp32_and_trains_fp32_tensors(name, tower, small):
    method, classes, images, labels = small(name)
    randomised(method, 4)
    reduced = Backbone.load(tower("tower_a"), precision="bf16")
    other = build_method(config_of(name), reduced, 0)
    randomised(other, 4)
    assert tensors_sha256(values(other)) == tensors_sha256(values(method))
    with torch.no_grad():
        exact = method.logits(images, classes)
        with reduced.autocast():
            near = other.logits(images, classes)
    assert near.dtype == torch.float32
    assert (near - exact).abs().max() <= BF16 * float(method.backbone.temperature)
    if name == "zero-shot":
        return
    # Dropout, where there is some, drops the same in both.
    method.draws, other.draws = torch_generator(0, "method"), torch_generator(0, "method")
    with reduced.autocast():
        losses = other.loss(images, labels, classes)
    losses["loss"].backward()
    gradients = [p.grad for p in other.parameters() if p.grad is not None]
    assert gradients
    assert {t.dtype for t in (*losses.values(), *other.parameters(), *gradients)} == {torch.float32}
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    exact_loss = method.loss(images, labels, classes)["loss"]
    assert abs(losses["loss"].item() - exact_loss.item()) < 0.1


# Training


def update(method: Method, data: ClientData, seed: int = 0, round: int = 1, **settings: Any):
    classes = method.tokenize(data.base_names, "a photo of a {}.")
    train = TrainConfig(**{"optimizer": "sgd", "lr": 0.01, "batch_size": 4, **settings})
    return local_update(method, data, classes, train, seed, "client-00", round, 5)


@trained_method
def test_a_client_with_one_image_can_train(name, small):
    method, *_ = small(name)
    before = snapshot(method.shared())
    statistics = update(method, client_data(1))
    assert statistics["steps"] == 1
    assert np.isfinite(statistics["loss"])
    after = snapshot(method.shared())
    assert any((after[n] != before[n]).any() for n in before)


@trained_method
def test_the_same_update_gives_the_same_bytes_and_seed_0_is_a_seed(name, small):
    """X2: nothing of an update, optimiser included, reaches the next one. X5: 0 is a seed."""
    method, *_ = small(name)
    start = values(method)

    def trained(seed: int) -> str:
        restore({**method.shared(), **method.private()}, start)
        update(method, client_data(9), seed)
        return tensors_sha256(values(method))

    zero = trained(0)
    assert zero != trained(1)
    assert zero == trained(0)


# Federations


def experiment_of(tiny_experiment, name: str, **changes: Any) -> Experiment:
    return tiny_experiment(
        method={"name": name, **ROWS[name].small},
        **{
            "clients": 3,
            "train": {"optimizer": "sgd", "lr": 0.05, "batch_size": 16},
            **changes,
        },
    )


@pytest.fixture
def tiny_experiment(tiny_experiment):
    """As everywhere, but without BLEND's settings for the other methods."""

    def build(method: Mapping[str, Any], **changes: Any) -> Experiment:
        from blend_core.config import parse_experiment

        plain = tiny_experiment(**changes).to_json()
        return parse_experiment({**plain, "method": dict(method)})

    return build


class WireTransport(LoopTransport):
    """Nodes behind real messages: packed, unpacked, answered in any order."""

    reverse = False

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Iterator[tuple[str, Reply]]:
        # What is shared is the same for everyone.
        assert len({tensors_sha256(request.shared) for request in requests.values()}) == 1
        for client in sorted(requests, reverse=self.reverse):
            request = Request.unpack(*requests[client].pack())
            yield client, Reply.unpack(*self.nodes[client].handle(request).pack())


class Reversed(WireTransport):
    reverse = True


def federate(experiment: Experiment, out: Path, transport: type[LoopTransport]) -> dict[str, Any]:
    names = client_names(experiment)
    assert names is not None
    sites = [local_site(experiment, name, i, out) for i, name in enumerate(names)]
    nodes = {site.name: Node(site, "fed") for site in sites}
    Coordinator(experiment, transport(nodes), out, "fed", "wire").run()
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


@trained_method
def test_a_federation_shares_means_keeps_private_parts_and_ignores_the_order(
    name, tiny_experiment, tmp_path
):
    """Checks 5 and 8 of METHODS 17; X4: what is reported is the last round, not the best."""
    experiment = experiment_of(tiny_experiment, name)
    run_loop(experiment, tmp_path / "loop", "fed")
    loop = json.loads((tmp_path / "loop" / "results.json").read_text())
    backwards = federate(experiment, tmp_path / "back", Reversed)
    assert backwards["shared_sha256"] == loop["shared_sha256"]
    assert backwards["clients"] == loop["clients"]
    assert backwards["final"] == loop["final"]
    for row in (row for found in loop["rounds"] for row in found["clients"]):
        assert row["training"]["steps"] > 0, "X11: a client that was asked was not trained"
    assert [len(found["clients"]) for found in loop["rounds"]] == [3, 3]
    private = [client["private_sha256"] for client in loop["clients"]]
    assert len(set(private)) == (3 if ROWS[name].table[1] else 1)
    last, _ = Generations(tmp_path / "loop" / "checkpoints").load(2)
    assert loop["shared_sha256"] == tensors_sha256(
        {n: v for n, v in last.items() if not n.startswith("uploads/")}
    )

    # The mean by hand: every client trains from the same start.
    described = Backbone.describe(experiment.backbone)
    start = snapshot(build_method(experiment.method, described, experiment.seed).shared())
    uploads, images = {}, {}
    for index, client in enumerate(client_names(experiment) or []):
        node = Node(local_site(experiment, client, index, tmp_path / "hand"), "fed")
        reply = node.handle(Request("train", "fed", 1, experiment.to_json(), shared=start))
        assert reply.error is None
        uploads[client], images[client] = reply.shared, reply.train_images
    total = sum(images.values())
    mean = {
        n: sum(images[c] / total * uploads[c][n].astype(np.float64) for c in uploads) for n in start
    }
    committed, _ = Generations(tmp_path / "loop" / "checkpoints").load(1)
    for tensor, value in mean.items():
        np.testing.assert_allclose(committed[tensor], value, rtol=0, atol=1e-6)
    assert tensors_sha256(weighted_mean(uploads, images)) == tensors_sha256(
        {n: committed[n] for n in start}
    )


@every_method
def test_a_client_that_never_trained_can_be_evaluated(name, tiny_experiment, tmp_path):
    experiment = experiment_of(
        tiny_experiment,
        name,
        rounds=1,
        server={"fraction": 0.34, "full_first_round": False},
    )
    results = federate(experiment, tmp_path / "run", WireTransport)
    assert sorted(results["final"]["counts"]) == sorted(client_names(experiment) or [])
    if name != "zero-shot":
        assert len(results["rounds"][0]["clients"]) == 1


@every_method
def test_a_resnet_backbone_carries_the_method_or_is_refused(name):
    described = Backbone.describe(BackboneConfig(name="RN50-quickgelu", weights="openai"))
    adapters = {"blend", "mma-fedavg", "pfedmma", "adaptformer", "clip-lora", "fedotp"}
    config = config_class(name)(name=name)
    if name in adapters:
        with pytest.raises(ConfigError, match=r"vision transformer, so .*choose a ViT model"):
            build_method(config, described, 0)
    else:
        build_method(config, described, 0)
