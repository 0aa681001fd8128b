"""Central differential privacy: clipping and noise by hand, the same after a kill, the budget."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from matrix import ROWS
from scripted import Scripted, events, honest

from blend_core.accounting import epsilon
from blend_core.config import PrivacyConfig, parse_experiment
from blend_core.errors import ConfigError
from blend_core.messages import Reply, Request
from blend_core.settings import load_experiment
from blend_core.state import StateError
from deploy.check import check
from server.aggregation import aggregate
from server.budget import Budget
from server.checkpoints import Checkpoints
from server.flower_rules import AdaptiveClipping, _aggregate, _record, central
from server.strategy import Coordinator

# So little noise that the arithmetic shows.
QUIET = {"kind": "central", "noise_multiplier": 1e-6, "noise_from": "seed"}
CHANGES = {"a": np.array([3.0, 4.0]), "b": np.array([0.3, 0.4]), "c": np.array([0.0, 0.0])}


def experiment(**privacy):
    return parse_experiment({"clients": 5, "privacy": privacy})


def test_changes_are_clipped_and_divided_by_the_clients_asked(tmp_path):
    mean, norm = central(CHANGES, 5, experiment(**QUIET), 1.0, 1, tmp_path)
    # Norms 5, 0.5 and 0, clipped to 1: (0.6, 0.8) + (0.3, 0.4), over 5: absent ones change nothing.
    np.testing.assert_allclose(mean, [0.18, 0.24], atol=1e-5)
    assert norm == 1.0


def test_every_client_counts_alike_and_adds_to_what_was_sent(tmp_path):
    sent = {"a": np.float32([10.0]), "b": np.float32([20.0])}
    uploads = {
        "x": {"a": np.float32([13.0]), "b": np.float32([24.0])},
        "y": {"a": np.float32([10.0]), "b": np.float32([20.0])},
    }
    setting = experiment(**QUIET)
    new = aggregate(setting, 1, sent, uploads, {"x": 1, "y": 99}, 2, Budget(setting), tmp_path)
    # (0.6, 0.8) / 2
    assert [float(new["a"][0]), float(new["b"][0])] == pytest.approx([10.3, 20.4], rel=1e-5)


def test_the_noise_has_the_deviation_it_should_have(tmp_path):
    setting = experiment(kind="central", noise_multiplier=2.0, noise_from="seed")
    mean, _ = central(dict.fromkeys("abcd", np.zeros(40_000)), 5, setting, 0.5, 1, tmp_path)
    # z C / asked = 2 * 0.5 / 5; the deviation of 40,000 draws is off by 0.35 %.
    assert mean.std() == pytest.approx(0.2, rel=0.02)
    assert abs(mean.mean()) < 0.004


def test_noise_is_the_same_again_and_another_in_every_round_and_seed(tmp_path):
    def noise(round: int, folder: str = "one", **privacy) -> list[float]:
        setting = experiment(**{"kind": "central", **privacy})
        return list(central({"a": np.zeros(4)}, 1, setting, 1.0, round, tmp_path / folder)[0])

    assert noise(1) == noise(1)
    assert noise(1) != noise(2)
    # Another run's key is another; from the seed all are alike, and no key is written.
    assert noise(1) != noise(1, "two")
    assert noise(1, "three", noise_from="seed") == noise(1, "four", noise_from="seed")
    assert not (tmp_path / "three").exists()
    assert (tmp_path / "one" / "noise.key").stat().st_mode & 0o777 == 0o600


def test_a_round_done_again_with_other_repliers_gets_other_noise(tmp_path):
    setting = experiment(kind="central")

    def released(replied, norm: float = 1.0, asked: int = 3) -> np.ndarray:
        return central(replied, asked, setting, norm, 1, tmp_path)[0]

    small = {"a": np.array([0.3, 0.4]), "b": np.array([0.1, 0.2])}
    # Same content, same noise.
    assert (released(small) == released(dict(reversed(small.items())))).all()
    # Other repliers, other noise: else 3 times the difference would be the change of b.
    bare = 3 * (released(small) - released({"a": small["a"]}))
    assert not np.allclose(bare, small["b"], atol=1e-6)
    # Also under another name, with another norm or another number of clients.
    renamed = {"a": small["a"], "c": small["b"]}
    assert not np.allclose(released(small), released(renamed))
    sums = [asked * released(small, 1.0, asked) for asked in (3, 4)]
    assert not np.allclose(*sums)
    noises = [(3 * released(small, norm) - [0.4, 0.6]) / norm for norm in (1.0, 2.0)]
    assert not np.allclose(*noises)


def test_a_damaged_key_is_named(tmp_path):
    (tmp_path / "noise.key").write_text("x")
    with pytest.raises(Exception, match=r"noise\.key: is damaged") as caught:
        central(CHANGES, 5, experiment(kind="central"), 1.0, 1, tmp_path)
    assert "\n" not in str(caught.value)


def test_nobody_elses_draws_change_and_none_changes_the_noise(tmp_path):
    np.random.seed(5)
    expected = np.random.normal(size=3)
    np.random.seed(5)
    first, _ = central(CHANGES, 5, experiment(**QUIET), 1.0, 1, tmp_path)
    assert (np.random.normal(size=3) == expected).all()
    again, _ = central(CHANGES, 5, experiment(**QUIET), 1.0, 1, tmp_path)
    assert (first == again).all()


def test_the_adaptive_norm_finds_the_quantile(tmp_path):
    """Norms 1 to 5: with quantile 0.5 the norm ends at the middle one, from both sides."""
    changes = {str(n): np.array([float(n), 0.0]) for n in (1, 2, 3, 4, 5)}
    setting = experiment(**QUIET, clipping="adaptive", clipping_lr=0.2)
    # The noise of the count is 5 / 20 clients: a fraction off by 0.05.
    for norm in (0.1, 40.0):
        for round in range(1, 50):
            _, norm = central(changes, 5, setting, norm, round, tmp_path)
        assert 1.9 < norm < 4.1


def test_an_adaptive_round_clips_and_is_noisy_by_one_norm():
    """Flower alone would size the noise by the next round's norm."""
    privacy = PrivacyConfig(kind="central", clipping="adaptive", noise_multiplier=1.0)
    wrapper = AdaptiveClipping(privacy, 1.0, asked=4, absent=2)
    wrapper.clipped_count_stddev = 0.0  # The count as it is.
    used = []
    add = wrapper._add_noise_to_aggregated_arrays
    wrapper._add_noise_to_aggregated_arrays = lambda found: (  # type: ignore[method-assign]
        used.append(wrapper.clipping_norm) or add(found)
    )
    wrapper.current_arrays = _record(np.zeros(2))
    tiny = np.array([1e-100, 0.0])
    _aggregate(wrapper, [np.array([3.0, 4.0]), tiny, tiny, tiny])
    # One of 4 is clipped, 2 absent ones by half: 1 - 2 / 4 unclipped is the quantile, it stays.
    assert used == [1.0]
    assert wrapper.clipping_norm == pytest.approx(1.0)
    _aggregate(wrapper, [np.array([3.0, 4.0])] * 2 + [tiny, tiny])
    # Two clipped: 1 - 3 / 4 unclipped, so the norm rises by exp(-0.2 (0.25 - 0.5)).
    assert used == [1.0, 1.0]
    assert wrapper.clipping_norm == pytest.approx(math.exp(0.05))


def test_adaptive_noise_leaves_room_for_the_noise_of_the_count():
    privacy = PrivacyConfig(kind="central", clipping="adaptive", noise_multiplier=1.0)
    wrapper = AdaptiveClipping(privacy, 1.0, asked=4, absent=0)
    # Andrew et al. 2021, theorem 1: z^-2 = z_delta^-2 + (2 sigma_b)^-2, here 1 = 3/4 + 1/4.
    assert wrapper.clipped_count_stddev == 1.0
    assert wrapper.noise_multiplier**-2 + 0.25 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"server": {"aggregation": "median"}}, "server.aggregation median"),
        ({"server": {"aggregate_stale": True}}, "server.aggregate_stale"),
        ({"server": {"max_change_ratio": 3.0}}, "server.max_change_ratio"),
        ({"method": {"name": "pfedmoap"}}, "method pfedmoap"),
        ({"privacy": {"kind": "central", "delta": 0.2}}, r"below 1 / clients = 0\.2"),
        ({"privacy": {"kind": "central", "target_epsilon": 4.0}}, r"one round alone spends 4\.38"),
        ({"privacy": {"clipping_norm": 2.0}}, "clipping_norm 2.0 is for kind central or local"),
        ({"privacy": {"kind": "central", "clipping_lr": 0.3}}, "is for clipping adaptive"),
        ({"privacy": {"kind": "local", "clipping": "adaptive"}}, "is for kind central"),
        ({"privacy": {"kind": "central", "noise_multiplier": 0.0}}, "noise_multiplier"),
    ],
)
def test_what_would_make_epsilon_untrue_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_experiment({"clients": 5, "privacy": {"kind": "central"}, **changes})
    assert "\n" not in str(caught.value)


# A run

ROUNDS = 6
PRIVACY = {"kind": "central", "noise_multiplier": 1.0, "clipping_norm": 3.0}


@pytest.fixture
def start(tiny_experiment, tower, tmp_path):
    def build(name: str, who, resume: bool = False, **changes) -> Coordinator:
        changed = {
            "rounds": ROUNDS,
            "clients": len(who),
            "backbone": tower("tower_a").model_dump(),
            "data": {"kind": "folders"},
            "server": {"max_change": 1e6},
            "privacy": PRIVACY,
            **changes,
        }
        out = tmp_path / name
        transport = Scripted(who)
        setting = tiny_experiment(**changed)
        return Coordinator(setting, transport, out, "fed", "scripted", resume=resume)

    return build


WHO = {name: honest(n) for name, n in (("a", 1), ("b", 3), ("c", 7))}


def results(out) -> dict:
    return json.loads((out / "results.json").read_text())


def test_results_say_what_was_spent(start, tmp_path):
    start("run", WHO).run()
    found = results(tmp_path / "run")["privacy"]
    assert found["epsilon"] == pytest.approx(epsilon(1.0, ROUNDS, 1e-5))
    assert found["epsilon_per_round"] == pytest.approx(4.377178, rel=1e-6)
    assert (found["delta"], found["clipping_norm"], found["noise_multiplier"]) == (1e-5, 3.0, 1.0)
    assert found["sampling"]["most_rounds_of_a_client"] == ROUNDS
    assert "losses carry no noise" in found["covers"]
    key = (tmp_path / "run" / "noise.key").read_text()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.name != "noise.key":
            assert key.encode() not in path.read_bytes()


@pytest.mark.parametrize("method", sorted(set(ROWS) - {"zero-shot", "pfedmoap"}))
def test_noise_covers_the_shared_tensors_of_every_method(tmp_path, tower, method):
    data = {
        "rounds": 1,
        "clients": 3,
        "method": {"name": method, **ROWS[method].small},
        "backbone": tower("tower_a").model_dump(),
        "data": {"kind": "folders"},
        "privacy": {"kind": "central", "noise_from": "seed"},
        "server": {"max_change": 1e6},
    }
    out = tmp_path / "run"
    run = Coordinator(parse_experiment(data), Scripted(WHO), out, "fed", "scripted")
    before = {n: p.detach().numpy().copy() for n, p in run.method.shared().items()}
    run.run()
    after = Checkpoints(out).load(1).shared
    changes = np.concatenate([(after[n] - before[n]).reshape(-1) for n in before])
    # Three changes of norm 1 over three clients, all in one direction, and noise of 1 / 3 a value.
    assert changes.std() == pytest.approx(1 / 3, rel=0.15)
    assert results(out)["privacy"]["epsilon"] == pytest.approx(4.377178, rel=1e-6)


def test_a_client_sampled_less_often_spends_less(start, tmp_path):
    start("run", WHO, server={"max_change": 1e6, "fraction": 0.34, "full_first_round": False}).run()
    found = results(tmp_path / "run")
    times = [len([r for r in found["rounds"] if r["clients"][0]["client"] == c]) for c in WHO]
    assert sum(times) == ROUNDS
    assert found["privacy"]["sampling"]["most_rounds_of_a_client"] == max(times)
    assert found["privacy"]["epsilon"] == pytest.approx(epsilon(1.0, max(times), 1e-5))


def test_training_stops_at_the_target_and_says_so(start, tmp_path):
    # 3 rounds cost 8.65, 4 rounds 10.4.
    assert epsilon(1.0, 3, 1e-5) < 9.0 < epsilon(1.0, 4, 1e-5)
    start("run", WHO, privacy={**PRIVACY, "target_epsilon": 9.0}).run()
    found = results(tmp_path / "run")
    assert (len(found["rounds"]), found["final"]["model_after_round"]) == (3, 3)
    assert found["privacy"]["epsilon"] <= 9.0
    assert "above privacy.target_epsilon 9" in found["privacy"]["stopped"]
    (event,) = [e for e in events(tmp_path / "run") if e["event"] == "stopped"]
    assert event["round"] == 3


class KilledError(Exception):
    pass


@pytest.mark.parametrize("clipping", ["fixed", "adaptive"])
def test_a_restart_changes_no_bit_and_resets_no_budget(start, tmp_path, clipping):
    privacy = {**PRIVACY, "clipping": clipping, "target_epsilon": 10.5}
    seeded = {**privacy, "noise_from": "seed"}
    start("whole", WHO, privacy=seeded).run()

    def dies(name: str, request: Request) -> Reply | None:
        if request.kind == "train" and request.round == 3:
            raise KilledError
        return honest(7)(name, request)

    with pytest.raises(KilledError):
        start("cut", {**WHO, "c": dies}, privacy=seeded).run()
    start("cut", WHO, resume=True, privacy=seeded).run()
    whole, cut = results(tmp_path / "whole"), results(tmp_path / "cut")
    assert cut["resumed_after_rounds"] == [2]
    assert cut["shared_sha256"] == whole["shared_sha256"]
    assert cut["privacy"] == whole["privacy"]
    assert cut["privacy"]["stopped"] is not None
    # With a secret key too: it lies beside the checkpoints and is drawn once.
    with pytest.raises(KilledError):
        start("secret", {**WHO, "c": dies}, privacy=privacy).run()
    key = (tmp_path / "secret" / "noise.key").read_text()
    start("secret", WHO, resume=True, privacy=privacy).run()
    assert (tmp_path / "secret" / "noise.key").read_text() == key
    assert results(tmp_path / "secret")["shared_sha256"] != whole["shared_sha256"]


@pytest.mark.parametrize("whole", [4, 0])
def test_rounds_that_are_done_again_after_damage_count_twice(start, tmp_path, whole):
    privacy = {**PRIVACY, "noise_from": "seed"}
    server = {"max_change": 1e6, "keep_checkpoints": ROUNDS + 1}
    start("run", WHO, privacy=privacy, server=server).run()
    checkpoints = Checkpoints(tmp_path / "run").generations
    for round in range(whole + 1, ROUNDS + 1):
        checkpoints.path(round).write_bytes(b"")
    start("run", WHO, resume=True, privacy=privacy, server=server).run()
    most = ROUNDS + ROUNDS - whole
    found = results(tmp_path / "run")["privacy"]
    assert found["sampling"]["most_rounds_of_a_client"] == most
    assert found["epsilon"] == pytest.approx(epsilon(1.0, most, 1e-5))
    # It is not counted again when the run is resumed again.
    start("run", WHO, resume=True, privacy=privacy, server=server).run()
    assert results(tmp_path / "run")["privacy"] == found


def test_a_resumed_run_does_not_go_on_without_its_key(start, tmp_path):
    start("run", WHO, rounds=1, server={"max_change": 1e6}).run()
    key = tmp_path / "run" / "noise.key"
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(StateError, match=r"noise\.key: is missing.* restore it") as caught:
        start("run", WHO, resume=True).run()
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (3, False)
    assert not key.exists()
    # Before anything was asked; and as long as a run goes on.
    assert "forming" not in [e["event"] for e in events(tmp_path / "run")[-2:]]
    with pytest.raises(StateError, match=r"noise\.key: is missing"):
        central(CHANGES, 3, experiment(kind="central"), 1.0, 2, tmp_path / "run")
    key.write_bytes(kept)
    start("run", WHO, resume=True).run()
    assert results(tmp_path / "run")["resumed_after_rounds"] == [1]


def test_a_run_that_ended_before_its_first_round_has_no_key_to_miss(start, tmp_path):
    def dies(name: str, request: Request) -> Reply | None:
        if request.kind == "train":
            raise KilledError
        return honest(7)(name, request)

    with pytest.raises(KilledError):
        start("run", {**WHO, "c": dies}).run()
    assert not (tmp_path / "run" / "noise.key").exists()
    start("run", WHO, resume=True).run()


@pytest.mark.parametrize("kind", ["central", "local"])
def test_noise_on_nothing_is_refused_before_anything_starts(start, tmp_path, kind):
    changes = {"method": {"name": "blend", "aggregate": "none"}, "privacy": {"kind": kind}}
    with pytest.raises(ConfigError, match=f"privacy.kind {kind}: method blend shares nothing") as e:
        start("run", WHO, **changes).run()
    assert "\n" not in str(e.value)
    assert [e["event"] for e in events(tmp_path / "run")] == ["started", "failed"]
    settings = ["method.aggregate=none", f"privacy.kind={kind}"]
    with pytest.raises(ConfigError, match="shares nothing"):
        check(load_experiment("quickstart", settings))


def test_without_noise_nothing_is_claimed(start, tmp_path):
    start("run", WHO, privacy={"kind": "none"}).run()
    assert results(tmp_path / "run")["privacy"] is None
    assert not (tmp_path / "run" / "noise.key").exists()
