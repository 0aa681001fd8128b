"""pFedMoAP against stored outputs of its public research code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support import assert_gradients, assert_server_mean, close, read_fixture

from blend_core.backbone import Backbone
from blend_core.config import TrainConfig, parse_experiment
from blend_core.errors import ConfigError, RunError
from blend_core.methods import build_method
from blend_core.methods.base import restore
from blend_core.methods.pfedmoap import PFedMoAPConfig, expert_order, select_experts
from blend_core.training import _optimizer
from deploy.loop import run_loop

ZERO = ("gate.k.bias", "gate.v.bias", "gate.o.bias")
GATE = [f"gate.{layer}.{part}" for layer in "koqv" for part in ("bias", "weight")]


def build(backbone, **settings):
    meta, arrays = read_fixture("pfedmoap")
    tower = backbone(meta["tower"])
    fields = {
        "context_length": meta["n_ctx"],
        "experts": meta["experts"],
        "gate_dim": meta["gate_dim"],
        "gate_heads": meta["gate_heads"],
        "beta": meta["beta"],
        "lambda_m": meta["lambda_m"],
    }
    config = PFedMoAPConfig(name="pfedmoap", **{**fields, **settings})
    return build_method(config, tower, 0), meta, arrays


def trained(backbone, **settings):
    """A method with the fixture's tensors and nothing received."""
    method, meta, arrays = build(backbone, **settings)
    restore(method.shared(), {"ctx": arrays["param/ctx"]})
    restore(method.private(), {name: arrays[f"param/{name}"] for name in GATE})
    return method, meta, arrays, torch.from_numpy(arrays["in/images"])


def received(arrays):
    return {"experts": arrays["in/expert_ctx"]}, {"ctx": arrays["param/ctx"]}


def gradients(method):
    return {name: value.grad for name, value in method.named_parameters()}


def test_logits_loss_and_gradients_with_experts(backbone):
    method, meta, arrays, images = trained(backbone)
    method.begin(*received(arrays))
    classes = method.tokenize(meta["class_names"], "")
    text = method.text_features(classes)
    close(text[0], arrays["out/text_features"], 1e-5)
    close(method.pool(text[1:]), arrays["out/expert_text_features_pooled"], 1e-5)
    query = method.pool(torch.from_numpy(arrays["out/image_features"]))
    mixed, weights = method.gate(query, method.pool(text))
    close(mixed, arrays["out/gate_output"], 1e-5)
    close(weights.mean(dim=2), arrays["out/gate_weights_head_mean"], 1e-5)
    close(method.logits(images, classes), arrays["out/logits"], 5e-5)
    close(method.logits(images, classes), arrays["eval/logits"], 5e-5)
    loss = method.loss(images, torch.tensor(meta["labels"]), classes)["loss"]
    close(loss, arrays["out/loss"], 1e-5)
    loss.backward()
    assert_gradients(gradients(method), arrays, "grad/", zero=ZERO)
    new = method.tokenize(meta["new_class_names"], "")
    close(method.logits(images, new), arrays["new/logits"], 5e-5)


def test_a_first_participation_is_plain_prompt_learning_and_leaves_the_gate_alone(backbone):
    method, meta, arrays, images = trained(backbone)
    method.begin({}, {})
    classes = method.tokenize(meta["class_names"], "")
    close(method.logits(images, classes), arrays["first/logits"], 5e-5)
    # METHODS eq. (0), without lambda_m, from the stored features.
    similarity = arrays["out/image_features"] @ arrays["out/text_features"].T
    equation = method.backbone.temperature.item() * similarity
    close(method.logits(images, classes), equation, 5e-5)
    loss = method.loss(images, torch.tensor(meta["labels"]), classes)["loss"]
    close(loss, arrays["first/loss"], 1e-5)
    loss.backward()
    assert_gradients({"ctx": method.ctx.grad}, arrays, "first/grad/")
    # None, not zero: an optimiser would still decay a tensor whose gradient is zero.
    assert all(value.grad is None for value in method.private().values())


def test_experts_of_an_earlier_request_are_forgotten(backbone):
    """Released code trains a newcomer with the experts of the client before it; not emulated."""
    method, meta, arrays, images = trained(backbone)
    classes = method.tokenize(meta["class_names"], "")
    method.begin(*received(arrays))
    method.logits(images, classes)
    method.begin({}, {})
    close(method.logits(images, classes), arrays["first/logits"], 5e-5)


def test_text_features_follow_the_experts_and_the_classes(backbone):
    method, meta, arrays, images = trained(backbone)
    base = method.tokenize(meta["class_names"], "")
    new = method.tokenize(meta["new_class_names"], "")
    payload, upload = received(arrays)
    calls = []
    encode = method.features
    method.features = lambda classes, context: calls.append(1) or encode(classes, context)
    labels = torch.tensor(meta["labels"])
    method.begin({"experts": payload["experts"][:2]}, upload)
    two = method.text_features(base)
    method.begin(payload, upload)
    for classes in (base, new, base, new):
        method.loss(images, labels % len(classes.names), classes)
    # Own prompt each time; the experts once per class list and request.
    assert len(calls) == 3 + 4 + 2 * 3
    four = method.text_features(base)
    assert (two.shape[0], four.shape[0]) == (3, 4)
    method.begin({"experts": -payload["experts"]}, upload)
    assert not torch.allclose(method.text_features(base)[1:], four[1:], atol=1e-3)


def test_inference_uses_the_own_prompt_and_training_the_received_one(backbone):
    method, meta, arrays, images = trained(backbone)
    payload, upload = received(arrays)
    classes = method.tokenize(meta["class_names"], "")
    restore(method.shared(), {"ctx": -arrays["param/ctx"]})  # the averaged prompt
    method.begin(payload, upload)
    close(method.logits(images, classes), arrays["eval/logits"], 5e-5)
    loss = method.loss(images, torch.tensor(meta["labels"]), classes)["loss"]
    assert abs(loss.item() - float(arrays["out/loss"])) > 1e-3


def test_without_lambda_and_output_layer_the_logits_are_zero(backbone):
    method, meta, arrays, images = trained(backbone, lambda_m=0.0)
    method.begin(*received(arrays))
    with torch.no_grad():
        method.gate.o.weight.zero_()
        method.gate.o.bias.zero_()
    classes = method.tokenize(meta["class_names"], "")
    assert not method.logits(images, classes).any()


def test_a_blunt_gate_averages_the_experts(backbone):
    """beta = 0 and identity layers: the mixture is the mean of the pooled text features."""
    method, meta, arrays, images = trained(backbone, beta=0.0)
    method.begin(*received(arrays))
    with torch.no_grad():
        for layer in (method.gate.v, method.gate.o):
            layer.weight.copy_(torch.eye(8))
            layer.bias.zero_()
    classes = method.tokenize(meta["class_names"], "")
    query = arrays["out/image_features"][:, ::4]
    pooled = np.concatenate(
        [arrays["out/text_features"][None, :, ::4], arrays["out/expert_text_features_pooled"]]
    )
    tau = method.backbone.temperature.item()
    expected = 0.5 * arrays["first/logits"] + tau * query @ pooled.mean(axis=0).T
    close(method.logits(images, classes), expected.astype(np.float32), 1e-4)


def test_server_averages_the_prompt_alone(backbone):
    method, _, arrays = build(backbone)
    names = list(method.shared())
    assert {f"server/upload/{n}" for n in names} == {k for k in arrays if "/upload/" in k}
    assert_server_mean(arrays, names)


# Names whose order is neither that of the ids nor its reverse: positions are no names.
NAMES = ["mira", "adam", "zoe", "kim", "bea", "tom"]


def choose(case, client, selection="nearest"):
    meta, arrays = read_fixture("pfedmoap")
    case = meta["selection"][case]
    pool = {NAMES[i]: arrays["selection/pool"][i] for i in case["trained"]}
    order = [NAMES[i] for i in case.get("fixed_order", [])]
    return select_experts(NAMES[client], pool, case["experts"], selection, order)


def expected(case, key="selected"):
    selected = read_fixture("pfedmoap")[0]["selection"][case][key]
    return {int(client): [NAMES[i] for i in ids] for client, ids in selected.items()}


def test_few_clients_get_all_the_others():
    for client, names in expected("few_trained").items():
        assert set(choose("few_trained", client)) == set(names)


def test_nearest_are_client_names_without_the_client_itself():
    """Released code ends with a TypeError here; a minimal repair returns positions in a list."""
    case = read_fixture("pfedmoap")[0]["selection"]["nearest_many_trained"]
    assert case["released_code_fails_with"] == "TypeError"
    for client, names in expected("nearest_many_trained", "selected_client_ids").items():
        assert choose("nearest_many_trained", client) == names


def test_random_is_the_fixed_order_without_the_client_itself():
    for client, names in expected("random").items():
        assert choose("random", client, "random") == names


def test_a_client_without_a_prompt_has_the_fixed_order_in_the_released_fixture():
    """Selection takes it as released code does; `payloads` sends such a client nothing."""
    case = "untrained_client_falls_back_to_fixed_order"
    for client, names in expected(case).items():
        assert choose(case, client) == names


def test_equally_near_clients_are_taken_by_name():
    places = {"c": 0, "b": 1, "a": -1, "d": 5}
    pool = {name: np.full((1, 2), place, np.float32) for name, place in places.items()}
    assert select_experts("c", pool, 3, "nearest", []) == ["a", "b"]


def test_the_fixed_order_belongs_to_the_seed_and_survives_newcomers():
    names = [f"client-{i:02d}" for i in range(9)]
    orders = {seed: expert_order(names, seed) for seed in range(3)}
    assert len({tuple(order) for order in orders.values()}) == 3
    assert all(sorted(order) == names for order in orders.values())
    assert expert_order(names[::-1], 0) == orders[0]
    fewer = [name for name in orders[0] if name in names[:5]]
    assert expert_order(names[:5], 0) == fewer


def test_payloads_hold_the_prompts_of_the_chosen_whatever_the_order_of_clients(tower):
    config = PFedMoAPConfig(name="pfedmoap", context_length=3, experts=3, gate_dim=8, gate_heads=2)
    method = build_method(config, Backbone.describe(tower("tower_a")), 0)
    _, arrays = read_fixture("pfedmoap")
    uploads = {name: {"ctx": arrays["selection/pool"][i]} for i, name in enumerate(NAMES)}
    turned = dict(reversed(uploads.items()))
    one = method.payloads([*NAMES, "newcomer"], uploads, 0)
    two = method.payloads(NAMES[::-1], turned, 0)
    assert set(one) == set(two) == set(NAMES)  # none for the newcomer
    for client, ids in expected("nearest_many_trained", "selected_client_ids").items():
        name = NAMES[client]
        wanted = np.stack([uploads[other]["ctx"] for other in ids])
        assert np.array_equal(one[name]["experts"], wanted)
        assert np.array_equal(two[name]["experts"], wanted)
    # Nobody to choose: nothing is sent.
    assert method.payloads(["zoe"], {"zoe": uploads["zoe"]}, 0) == {}


def test_one_expert_means_no_mixture(tower):
    config = PFedMoAPConfig(name="pfedmoap", experts=1, gate_dim=8, gate_heads=2)
    method = build_method(config, Backbone.describe(tower("tower_a")), 0)
    uploads = {name: {"ctx": np.zeros((16, 64), np.float32)} for name in NAMES}
    assert method.payloads(NAMES, uploads, 0) == {}


def test_initial_values_are_those_of_torch_linear_layers_and_belong_to_the_seed(tower):
    config = PFedMoAPConfig(name="pfedmoap", gate_dim=16)
    described = Backbone.describe(tower("tower_a"))
    one, again, other = (build_method(config, described, seed) for seed in (1, 1, 2))
    assert list(one.private()) == GATE
    assert list(one.shared()) == ["ctx"]
    for name, value in one.private().items():
        assert 0.15 < value.detach().abs().max() <= 0.25  # 1/sqrt(16)
        assert torch.equal(value, again.private()[name])
        assert not torch.equal(value, other.private()[name])


def test_the_gate_has_its_own_learning_rate(backbone):
    method, _, _ = build(backbone, gate_lr=0.03)
    groups = _optimizer(method, TrainConfig(lr=0.002)).param_groups
    assert {group["initial_lr"]: len(group["params"]) for group in groups} == {0.002: 1, 0.03: 8}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate_dim": 12}, r"method.gate_dim = 12: must divide 32, the joint dimension"),
        (
            {"gate_dim": 16, "gate_heads": 3},
            r"method.gate_heads = 3: must divide method.gate_dim = 16",
        ),
        ({"context_length": 74}, r"method.context_length = 74: .* at most 73"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_number(tower, settings, message):
    described = Backbone.describe(tower("tower_a"))
    with pytest.raises(ConfigError, match=message):
        build_method(PFedMoAPConfig(name="pfedmoap", **settings), described, 0)


@pytest.mark.parametrize(
    "payload",
    [
        {"experts": np.zeros((4, 4, 64), np.float32)},
        {"experts": np.zeros((2, 4, 63), np.float32)},
        {"experts": np.zeros((0, 4, 64), np.float32)},
        {"other": np.zeros((2, 4, 64), np.float32)},
    ],
)
def test_a_payload_that_does_not_fit_is_refused(backbone, payload):
    method, _, _ = build(backbone)
    with pytest.raises(RunError, match=r"expected experts of shape \(1 to 3, 4, 64\)"):
        method.begin(payload, {})


def test_bfloat16_features_are_gated_in_float32(tower):
    meta, arrays = read_fixture("pfedmoap")
    described = Backbone.load(tower("tower_a"), precision="bf16")
    config = PFedMoAPConfig(name="pfedmoap", context_length=4, experts=4, gate_dim=8, gate_heads=2)
    method = build_method(config, described, 0)
    restore(method.shared(), {"ctx": arrays["param/ctx"]})
    restore(method.private(), {name: arrays[f"param/{name}"] for name in GATE})
    method.begin(*received(arrays))
    images = torch.from_numpy(arrays["in/images"])
    with described.autocast():
        classes = method.tokenize(meta["class_names"], "")
        logits = method.logits(images, classes)
        loss = method.loss(images, torch.tensor(meta["labels"]), classes)["loss"]
    assert logits.dtype == loss.dtype == torch.float32
    close(logits, arrays["out/logits"], 0.5)
    loss.backward()
    assert all(value.grad.dtype == torch.float32 for value in method.parameters())


def federation(folder, clients=3, **server):
    experiment = parse_experiment(
        {
            "seed": 1,
            "rounds": 2,
            "clients": clients,
            "method": {"name": "pfedmoap", "context_length": 4},
            "data": {"shots": 2, "test_per_class": 1, "alpha": 100.0},
            "train": {"optimizer": "sgd", "lr": 0.002, "crop_scale": 1.0},
            "server": server,
        }
    )
    run_loop(experiment, folder, "fed")
    return json.loads((folder / "results.json").read_text())


def test_from_the_second_round_on_requests_carry_the_experts(tmp_path):
    found = federation(tmp_path)
    first, second = ([row["bytes_down"] for row in r["clients"]] for r in found["rounds"])
    prompt = 4 * 4 * 128
    assert first == [prompt + 128] * 3
    assert second == [3 * prompt + 128] * 3  # E = min(10, 3)
    assert [row["bytes_up"] for row in found["rounds"][1]["clients"]] == [prompt + 128] * 3
    assert len({client["private_sha256"] for client in found["clients"]}) == 3
    assert set(found["final"]["counts"]) == {client["name"] for client in found["clients"]}


def test_a_client_that_is_never_asked_is_evaluated(tmp_path):
    found = federation(tmp_path, fraction=0.4, full_first_round=False)
    rows = [row for r in found["rounds"] for row in r["clients"]]
    asked = {row["client"] for row in rows}
    # One client a round: whoever it is, nobody else's prompt was there for it.
    assert [row["bytes_down"] for row in rows] == [4 * 4 * 128 + 128] * 2
    names = {client["name"] for client in found["clients"]}
    assert len(names) == 3
    assert names - asked
    assert set(found["final"]["counts"]) == names
    assert not found["clients_not_evaluated"]
