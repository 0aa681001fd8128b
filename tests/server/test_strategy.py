"""The coordinator with scripted clients: sampling, refusals, deadlines, what the run records."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from scripted import Client, Scripted, events, honest

from blend_core import __version__
from blend_core.errors import ConfigError, FormationError, RunError, SiteError
from blend_core.messages import Reply, Request, failure
from blend_core.settings import load_experiment
from blend_core.state import Generations
from server.aggregation import weighted_mean
from server.strategy import Coordinator


@pytest.fixture
def coordinator(tiny_experiment, tower, tmp_path):
    def build(who: Mapping[str, Client], reverse: bool = False, **changes) -> Coordinator:
        changes = {
            "backbone": tower("tower_a").model_dump(),
            # Sites that bring their own folders may have any name.
            "data": {"kind": "folders"},
            **changes,
            "server": {"max_change": 1e6, **changes.get("server", {})},
        }
        experiment = tiny_experiment(**{"clients": len(who), **changes})
        return Coordinator(experiment, Scripted(who, reverse), tmp_path, "fed", "scripted")

    return build


def test_the_mean_is_weighted_by_images_and_independent_of_the_order_of_replies():
    uploads = {"b": {"w": np.float32([4, 8])}, "a": {"w": np.float32([1, 2])}}
    # (1 * [1, 2] + 3 * [4, 8]) / 4
    assert weighted_mean(uploads, {"a": 1, "b": 3})["w"].tolist() == [3.25, 6.5]
    turned = dict(reversed(uploads.items()))
    assert weighted_mean(turned, {"b": 3, "a": 1})["w"].tolist() == [3.25, 6.5]


def test_a_run_averages_every_round_and_records_rows(coordinator, tmp_path):
    run = coordinator({"a": honest(1), "b": honest(3)})
    run.run()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["round"] for r in results["rounds"]] == [1, 2]
    row = results["rounds"][0]["clients"][0]
    assert (row["client"], row["status"], row["train_images"]) == ("a", "accepted", 1)
    assert row["bytes_up"] == row["bytes_down"] == results["bytes_per_round"]["up"]["a"]
    # 1 of 10 and 3 of 10 right: Per. 20; 1 of 20 new right: Gen. 5.
    assert (results["final"]["per"], results["final"]["gen"]) == (20.0, 5.0)
    assert results["final"]["counts"]["b"]["base"] == [3, 20]
    assert results["clients"][0]["private_sha256"] == "hash of a"
    # Every round adds (1 * 1 + 3 * 3) / 4 = 2.5 to every value.
    checkpoints = Generations(tmp_path / "checkpoints")
    _, second, _ = checkpoints.newest_before(3)
    _, first, _ = checkpoints.newest_before(2)
    for name in second:
        np.testing.assert_allclose(second[name] - first[name], 2.5, rtol=1e-5)


def test_the_order_of_replies_changes_no_bit(coordinator, tmp_path):
    hashes = set()
    for reverse in (False, True):
        coordinator({"a": honest(1), "b": honest(3), "c": honest(7)}, reverse).run()
        hashes.add(json.loads((tmp_path / "results.json").read_text())["shared_sha256"])
    assert len(hashes) == 1


def test_a_bad_reply_is_refused_and_the_round_goes_on(coordinator, tmp_path):
    def poisoned(name: str, request: Request) -> Reply:
        reply = honest(5)(name, request)
        for value in reply.shared.values():
            value.fill(np.nan)
        return reply

    coordinator({"a": honest(1), "b": poisoned}).run()
    refused = [e for e in events(tmp_path) if e["event"] == "refused"]
    assert {(e["round"], e["client"]) for e in refused} == {(1, "b"), (2, "b")}
    rows = json.loads((tmp_path / "results.json").read_text())["rounds"][0]["clients"]
    assert [r["status"] for r in rows] == ["accepted", "refused"]
    assert "not finite" in rows[1]["reason"]


def test_too_few_acceptable_replies_end_the_run_with_the_reasons(coordinator, tmp_path):
    def silent(name: str, request: Request) -> Reply | None:
        return honest(2)(name, request) if request.kind == "join" else None

    run = coordinator({"a": honest(1), "b": silent}, server={"min_replies": 2})
    with pytest.raises(RunError, match=r"round 1: 1 acceptable .*min_replies = 2; b: no reply"):
        run.run()
    last = events(tmp_path)[-1]
    assert (last["event"], last["exit_code"]) == ("failed", 1)


def test_a_run_that_is_stopped_by_flower_says_so_in_its_journal(coordinator, tmp_path):
    def stopped(name: str, request: Request) -> Reply:
        if request.round == 2:
            raise SystemExit(0)  # What Flower makes of `flwr stop`.
        return honest(1)(name, request)

    with pytest.raises(SystemExit):
        coordinator({"a": stopped}).run()
    last = events(tmp_path)[-1]
    assert (last["event"], last["exit_code"]) == ("failed", 143)
    assert last["message"].startswith("stopped from outside: by flwr stop, by a signal")


def test_an_absent_client_is_recorded_and_evaluated_later(coordinator, tmp_path):
    def late(name: str, request: Request) -> Reply | None:
        return None if request.kind == "train" and request.round == 1 else honest(2)(name, request)

    coordinator({"a": honest(1), "b": late}).run()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["status"] for r in results["rounds"][0]["clients"]] == ["accepted", "absent"]
    assert [r["status"] for r in results["rounds"][1]["clients"]] == ["accepted", "accepted"]
    assert set(results["final"]["counts"]) == {"a", "b"}


def test_a_federation_that_cannot_form_names_who_is_missing(coordinator, tmp_path):
    run = coordinator({"client-00": honest(1)}, clients=2, data={"kind": "shapes"})
    with pytest.raises(FormationError, match=r"1 of 2 clients joined .*missing: client-01"):
        run.run()
    assert events(tmp_path)[-1]["exit_code"] == 4


def test_a_sites_own_error_ends_formation_with_its_exit_code(coordinator, tmp_path):
    def broken(name: str, request: Request) -> Reply:
        return failure("join", 0, name, SiteError("b: E01 data directory not found"))

    with pytest.raises(SiteError, match="E01 data directory not found"):
        coordinator({"a": honest(1), "b": broken}).run()
    assert events(tmp_path)[-1]["exit_code"] == 3


def test_a_name_that_is_no_client_of_the_benchmark_is_refused(coordinator, tmp_path):
    clients = {"mallory": honest(1), "client-00": honest(1)}
    run = coordinator(clients, clients=1, rounds=1, data={"kind": "shapes"})
    run.record.engine = "flower"
    run.run()
    assert list(run.members) == ["client-00"]
    refused = [e for e in events(tmp_path) if e["event"] == "refused"]
    assert [e["client"] for e in refused] == ["mallory"]
    reason = "no client of this experiment has that name"
    assert read(tmp_path)["refused_nodes"] == [{"after": 0, "client": "mallory", "reason": reason}]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "a\nb", "x" * 65])
def test_a_name_that_cannot_be_a_folder_is_refused(coordinator, name):
    run = coordinator({name: honest(1)})
    with pytest.raises(FormationError, match="no client of this experiment has that name"):
        run.run()


def test_a_stranger_with_an_error_does_not_end_an_operators_federation(coordinator, tmp_path):
    def broken(name: str, request: Request) -> Reply:
        return failure("join", 0, "node 7", RunError("the reply cannot be read: rubbish\x1b[2J"))

    who = {"odd": broken, "a": honest(1), "b": honest(3)}
    run = coordinator(who, clients=2)
    run.record.engine = "flower"
    run.run()
    (refused,) = [event for event in events(tmp_path) if event["event"] == "refused"]
    assert (refused["client"], refused["round"]) == ("node 7", 0)
    assert refused["reason"].startswith("the reply cannot be read: rubbish")
    # Where all nodes are our own, waiting for better ones is in vain.
    with pytest.raises(RunError, match="cannot be read"):
        coordinator(who, clients=2).run()


def test_a_refused_client_does_not_end_formation_for_the_others(coordinator):
    def old(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        reply.version = "0.0.1"
        return reply

    run = coordinator({"a": old, "b": honest(1)}, clients=1, rounds=1)
    run.record.engine = "flower"
    run.run()
    assert list(run.members) == ["b"]
    # Where all nodes are our own, nobody else comes.
    with pytest.raises(FormationError, match=r"^refused a: it runs version"):
        coordinator({"a": old, "b": honest(1)}, clients=2).run()


@pytest.mark.parametrize("engine", ["flower", "processes"])
def test_an_error_of_another_version_is_a_refusal_that_names_both(coordinator, tmp_path, engine):
    """What an old site says of a setting that it does not know is beside the point."""

    def old(name: str, request: Request) -> Reply:
        reply = failure(request.kind, request.round, name, ConfigError("x: unknown key"))
        reply.version = "0.0.1"
        return reply

    run = coordinator({"a": old, "b": honest(1)}, clients=1, rounds=1)
    run.record.engine = engine
    why = f"it runs version '0.0.1', the server {__version__}"
    if engine == "flower":
        run.run()
        assert list(run.members) == ["b"]
        assert read(tmp_path)["refused_nodes"] == [{"after": 0, "client": "a", "reason": why}]
        return
    with pytest.raises(FormationError, match=r"^refused a: it runs version '0\.0\.1'"):
        run.run()


def test_a_site_that_comes_back_with_another_version_is_refused_by_it(coordinator, tmp_path):
    def upgraded(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        if request.round == 1:
            reply = failure(request.kind, request.round, name, ConfigError("x: unknown key"))
            reply.version = "0.0.1"
        return reply

    coordinator({"a": upgraded, "b": honest(1)}).run()
    row = read(tmp_path)["rounds"][0]["clients"][0]
    assert (row["status"], row["reason"][:24]) == ("refused", "it runs version '0.0.1',")


def test_who_joins_in_mid_run_must_fit_as_those_who_formed_the_federation(coordinator):
    def of(name: str, backbone: str, **changes) -> Reply:
        reply = honest(1)(name, run.formation.request)
        reply.statistics["backbone_sha256"] = backbone
        for key, value in changes.items():
            setattr(reply, key, value)
        return reply

    def client(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        if request.kind == "join":
            reply.statistics["backbone_sha256"] = "mine"
        return reply

    run = coordinator({"a": client, "b": client})
    run.run()
    assert run.unfit(of("b", "mine")) is None
    assert run.unfit(of("b", "other")).startswith("its backbone (SHA-256 other) is not that of a")
    assert run.unfit(of("b", "mine", version="0.0.1")).startswith("it runs version")
    assert run.unfit(of("../b", "mine")) == "no client of this experiment has that name"
    assert run.unfit(of("b", "mine", train_images=-1)).startswith("its number of training images")


def test_a_round_lost_to_sites_states_alone_ends_with_their_exit_code(coordinator, tmp_path):
    def broken(name: str, request: Request) -> Reply:
        if request.kind == "train":
            return failure("train", request.round, name, SiteError("state is\ndamaged"))
        return honest(1)(name, request)

    with pytest.raises(SiteError, match=r"round 1: 0 acceptable.*a: state is damaged"):
        coordinator({"a": broken}).run()
    assert events(tmp_path)[-1]["exit_code"] == 3


def test_odd_statistics_of_a_refused_reply_harm_nobody(coordinator, tmp_path):
    def odd(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        if request.kind == "train":
            reply.statistics |= {"train_span": ["x", 1], "training": 7, "worker": [1]}
        return reply

    coordinator({"a": honest(1), "b": odd}).run()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["status"] for r in results["rounds"][1]["clients"]] == ["accepted", "refused"]


def test_a_client_with_another_version_is_refused_by_name(coordinator):
    def old(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        reply.version = "0.0.1"
        return reply

    with pytest.raises(FormationError, match=r"b: it runs version '0\.0\.1'"):
        coordinator({"a": honest(1), "b": old}).run()


def test_sampling_is_by_name_seeded_and_without_replacement(coordinator):
    clients = {f"c{i}": honest(i) for i in range(10)}
    run = coordinator(clients, rounds=6, server={"fraction": 0.35})
    run.run()
    # All in round 1, because BLEND has private tensors.
    assert run.transport.asked[0] == (1, [f"c{i}" for i in range(1, 10)])
    asked = [names for round, names in run.transport.asked if 1 < round <= 6]
    # c0 has no training image and is never asked; floor(0.35 * 9) = 3.
    assert all(len(set(names)) == 3 and "c0" not in names for names in asked)
    assert len({tuple(names) for names in asked}) > 1
    again = coordinator(clients, rounds=6, server={"fraction": 0.35})
    again.run()
    assert again.transport.asked == run.transport.asked
    other = coordinator(clients, rounds=6, seed=0, server={"fraction": 0.35})
    other.run()
    assert other.transport.asked != run.transport.asked
    # The last evaluation asks everyone, sampled or not.
    assert run.transport.asked[-1] == (7, sorted(clients))


def test_requests_say_which_round_of_the_client_was_accepted_last(coordinator):
    seen: list[tuple[int, int]] = []

    def watching(name: str, request: Request) -> Reply:
        seen.append((request.round, request.last_round))
        return honest(1)(name, request)

    coordinator({"a": watching}, rounds=3).run()
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_zero_shot_runs_no_round(tiny_experiment, tower, tmp_path):
    settings = ["method={name: zero-shot}", "clients=1", "data.kind=folders"]
    experiment = load_experiment("quickstart", settings)
    experiment = experiment.model_copy(update={"backbone": tower("tower_a")})
    transport = Scripted({"a": honest(1)})
    Coordinator(experiment, transport, tmp_path, "fed", "scripted").run()
    assert [round for round, _ in transport.asked] == [experiment.rounds + 1]
    assert json.loads((tmp_path / "results.json").read_text())["rounds"] == []


def test_last_checkpoints_are_kept(coordinator, tmp_path):
    coordinator({"a": honest(1)}, rounds=5).run()
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("round-*"))
    assert names == [f"round-{n:06d}.safetensors" for n in (3, 4, 5)]


def test_all_clients_are_asked_first_where_the_method_has_private_tensors(coordinator):
    who = {f"c{i}": honest(10) for i in range(4)}
    for settings, expected in (
        ({"server": {"fraction": 0.5}}, [4, 2, 4]),  # BLEND has a private projection
        ({"server": {"fraction": 0.5, "full_first_round": False}}, [2, 2, 4]),
        (
            {"server": {"fraction": 0.5}, "method": {"aggregate": "full"}},
            [2, 2, 4],
        ),
        (
            {
                "server": {"fraction": 0.5, "full_first_round": True},
                "method": {"aggregate": "full"},
            },
            [4, 2, 4],
        ),
    ):
        run = coordinator(who, **settings)
        run.run()
        assert [len(clients) for _, clients in run.transport.asked] == expected


def test_stale_uploads_enter_the_mean_if_asked_for(coordinator):
    """METHODS 10.4: released code averages every client's last upload, sampled or not."""

    def adding(images: int, value: float) -> Client:
        def client(name: str, request: Request) -> Reply:
            reply = honest(images)(name, request)
            reply.shared = {k: v * 0 + np.float32(value) for k, v in reply.shared.items()}
            return reply

        return client

    who = {"a": adding(2, 1.0), "b": adding(6, 5.0)}
    server = {"fraction": 0.5, "full_first_round": True}
    for stale, expected in ((True, 4.0), (False, None)):
        run = coordinator(who, server={**server, "aggregate_stale": stale})
        run.run()
        (asked,) = dict(run.transport.asked)[2]
        checkpoint = run.checkpoints.load(2)
        values = {float(v.flat[0]) for v in checkpoint.shared.values()}
        assert values == {expected or {"a": 1.0, "b": 5.0}[asked]}
        assert set(checkpoint.uploads) == ({"a", "b"} if stale else set())


def test_a_stale_upload_counts_by_the_images_it_was_made_of(coordinator, tmp_path):
    """Not by those that its site had when it joined, nor when it joined a resumed run."""

    def growing(name: str, request: Request) -> Reply | None:
        if request.round == 2 and request.kind == "train":
            return None
        reply = honest(3 if request.kind == "train" else 1)(name, request)
        reply.shared = {k: v * 0 + np.float32(5) for k, v in reply.shared.items()}
        return reply

    def one(name: str, request: Request) -> Reply:
        reply = honest(1)(name, request)
        reply.shared = {k: v * 0 + np.float32(1) for k, v in reply.shared.items()}
        return reply

    server = {"aggregate_stale": True, "min_replies": 1}
    run = coordinator({"a": growing, "b": one}, server=server)
    run.run()
    checkpoint = run.checkpoints.load(2)
    assert checkpoint.upload_images == {"a": 3, "b": 1}
    # (3 * 5 + 1 * 1) / 4, although client a told of one image when it joined.
    assert {float(v.flat[0]) for v in checkpoint.shared.values()} == {4.0}


def scored(right: Mapping[int, int], part: Mapping[str, object] | None = None) -> Client:
    """A client with so many of 10 test images right in a round; none of 10 in others."""

    def client(name: str, request: Request) -> Reply:
        reply = honest(5)(name, request)
        score = [right.get(request.round, 0), 10]
        reply.statistics["counts"] = {"local": score, "base": score, "novel": [0, 0]}
        reply.statistics["backbone_sha256"] = "weights"
        if request.kind == "join" and part is not None:
            reply.statistics["data"] = dict(part)
        return reply

    return client


def part_of(
    domain: str | None = None, manifest: str = "m" * 64, published: bool = True
) -> dict[str, object]:
    return {"manifest_sha256": manifest, "domain": domain, "published": published}


def read(tmp_path) -> dict:
    return json.loads((tmp_path / "results.json").read_text())


# The server does not have it, so it cannot know its partition.
DATA_SET = {"kind": "office_caltech10", "shots": 0}


def test_a_client_of_another_partition_is_refused_and_named(coordinator, tmp_path):
    mine, other = scored({}, part_of()), scored({}, part_of(manifest="n" * 64))
    who = {"client-00": mine, "client-01": other}
    refused = r"client-01: its partition \(SHA-256 n+\) is not that of client-00"
    with pytest.raises(FormationError, match=refused):
        coordinator(who, data=DATA_SET).run()
    coordinator(dict.fromkeys(who, mine), data=DATA_SET).run()
    results = read(tmp_path)
    assert (results["manifest_sha256"], results["backbone_sha256"]) == ("m" * 64, "weights")


def test_domains_have_mean_and_deviation_over_their_clients(coordinator, tmp_path):
    # The last evaluation of two rounds is number 3.
    who = {
        "client-00": scored({3: 9}, part_of("dslr")),
        "client-01": scored({3: 6}, part_of("dslr")),
        "client-02": scored({3: 2}, part_of("webcam")),
    }
    coordinator(who, data=DATA_SET).run()
    results = read(tmp_path)
    domains = results["final"]["domains"]
    assert {d: (m["per"], m["std"]["per"]) for d, m in domains.items()} == {
        "dslr": (75.0, 15.0),
        "webcam": (20.0, 0.0),
    }
    assert [client["domain"] for client in results["clients"]] == ["dslr", "dslr", "webcam"]
    assert results["final"]["per"] == pytest.approx(170 / 3)


def test_without_domains_there_are_none_and_nothing_of_a_partition(coordinator, tmp_path):
    coordinator({"a": honest(1)}).run()
    results = read(tmp_path)
    assert (results["final"]["domains"], results["manifest_sha256"]) == ({}, None)
    assert results["clients"][0]["domain"] is None


def test_the_last_five_and_the_best_are_models_after_rounds_that_all_clients_measured(
    coordinator, tmp_path
):
    # Round r measures the model after round r - 1, and number 7 the last; the untrained does not
    # count, nor does what b missed: round 4's.
    scores = {1: 10, 2: 3, 3: 9, 4: 10, 5: 2, 6: 9, 7: 8}

    def absent_in_4(name: str, request: Request) -> Reply | None:
        return None if request.round == 4 else scored(scores)(name, request)

    select = {"evaluation": {"select": "best-local-test"}}
    coordinator({"a": scored(scores), "b": absent_in_4}, rounds=6, **select).run()
    results = read(tmp_path)
    last = results["final"]["mean_last_five"]
    assert (last["after_rounds"], last["local"]) == ([1, 2, 4, 5, 6], 62.0)  # 30 90 20 90 80
    best = results["best_on_test"]
    assert (best["model_after_round"], best["local"], best["chosen_from"]) == (5, 90.0, 5)
    assert (best["optimism"]["local"], best["optimism"]["gen"]) == (10.0, None)
    assert (results["final"]["local"], results["final"]["model_after_round"]) == (80.0, 6)
    warnings = [e["message"] for e in events(tmp_path) if e["event"] == "warning"]
    assert any("chooses a round by its test images" in text for text in warnings)


def test_without_the_paper_mode_nothing_is_chosen_on_test_images(coordinator, tmp_path):
    coordinator({"a": scored({3: 5})}).run()
    results = read(tmp_path)
    assert results["best_on_test"] is None
    last = results["final"]["mean_last_five"]
    assert (last["local"], last["reason"]) == (None, "2 of 5 evaluations of all clients")
    assert not [e for e in events(tmp_path) if e["event"] == "warning"]


def test_a_record_names_data_and_seeds(coordinator, tmp_path):
    coordinator({"a": honest(1), "b": honest(3)}, seed=0, data={"kind": "folders"}).run()
    results = read(tmp_path)
    assert results["dataset"] == "folders"
    assert results["seeds"] == {"run": 0, "fewshot": None, "partition": None}
    assert not results["comparable"]
    assert results["partition"] is None


def test_zero_shot_as_published_is_of_data_that_papers_have_not_of_sites_own(coordinator, tmp_path):
    def described(images: int) -> Client:
        def client(name: str, request: Request) -> Reply:
            reply = honest(images)(name, request)
            reply.statistics["data"] = part_of()
            return reply

        return client

    who = {"client-00": described(1), "client-01": described(3)}
    coordinator(who, data={"kind": "dtd"}).run()
    # 1 and 3 of 20 base images each, 1 and 1 of 20 new ones: 4 of 40 and 2 of 40.
    published = read(tmp_path)["zero_shot"]["as_published"]
    assert (published["per"], published["gen"]) == (10.0, 5.0)
    assert published["hmean"] == pytest.approx(2 * 10 * 5 / 15)
    coordinator({"a": honest(1), "b": honest(3)}, data={"kind": "folders"}).run()
    results = read(tmp_path)
    assert results["zero_shot"]["gen"] == 5.0
    assert "as_published" not in results["zero_shot"]


def test_the_tiny_model_on_sites_own_photographs_says_what_it_is(coordinator, tmp_path):
    coordinator({"a": honest(1)}, data={"kind": "folders"}, backbone={}).run()
    results = read(tmp_path)
    assert results["note"] == (
        "blend-tiny, a toy model that knows rendered shapes only: not comparable with the papers' "
        "numbers"
    )
    assert not results["comparable"]


VIT = {"name": "ViT-B-16", "weights": "openai"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone": VIT}, None),
        ({}, "blend-tiny, a toy model that knows rendered shapes only"),
        (
            {"backbone": VIT, "data": {"max_test_per_class": 3}},
            "at most 3 test images per class",
        ),
        ({"backbone": VIT, "published": False}, "a split of your own (blend data make-split)"),
    ],
)
def test_what_differs_from_the_papers_makes_a_run_not_comparable(
    coordinator, tmp_path, changes, reason
):
    who = {"client-00": scored({}, part_of(published=changes.get("published", True)))}
    data = {"kind": "dtd", **changes.get("data", {})}
    backbone = changes.get("backbone", {})
    coordinator(who, rounds=1, data=data, backbone=backbone).run()
    results = read(tmp_path)
    assert results["comparable"] is (reason is None)
    note = None if reason is None else f"{reason}: not comparable with the papers' numbers"
    assert results["note"] == note


def test_how_the_images_were_dealt_is_in_the_results_with_what_was_left_unset(
    coordinator, tmp_path
):
    shapes = {"kind": "shapes", "shots": None}
    coordinator({"client-00": honest(1)}, seed=7, data=shapes).run()
    results = read(tmp_path)
    assert results["partition"] == {
        "shots": 16,
        "subset": "base",
        "rule": "dirichlet-preferred",
        "params": {"alpha": 0.01, "boost": 1.0},
        "fewshot_seed": 7,
        "partition_seed": 7,
    }
