"""Rules of aggregation: what one hostile client of five can do, by hand; order changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from blend_core.config import parse_experiment
from blend_core.errors import ConfigError
from blend_core.messages import Tensors
from server.aggregation import aggregate, weighted_mean
from server.budget import Budget

# What clients were sent, and what the honest ones send back: changes (1,2) (2,3) (3,1) (2,2).
SENT = {"a": np.float32([[10.0]]), "b": np.float32([20.0])}
HONEST = {
    "c0": {"a": np.float32([[11.0]]), "b": np.float32([22.0])},
    "c1": {"a": np.float32([[12.0]]), "b": np.float32([23.0])},
    "c2": {"a": np.float32([[13.0]]), "b": np.float32([21.0])},
    "c3": {"a": np.float32([[12.0]]), "b": np.float32([22.0])},
}
ATTACKS = {
    "1000 times": {"a": np.float32([[2010.0]]), "b": np.float32([2020.0])},
    "negated": {"a": np.float32([[-12.0]]), "b": np.float32([-22.0])},
    "constant": {"a": np.float32([[500.0]]), "b": np.float32([500.0])},
}
ROBUST = ("median", "trimmed-mean", "krum", "multi-krum")


def after(uploads: dict[str, Tensors], tmp_path, **server) -> list[float]:
    experiment = parse_experiment({"clients": 5, "server": server})
    images = {client: 100 if client == "evil" else 1 for client in uploads}
    new = aggregate(
        experiment, 1, SENT, uploads, images, 5, Budget(experiment), tmp_path / "unused"
    )
    assert {name: (v.shape, v.dtype) for name, v in new.items()} == {
        "a": ((1, 1), np.dtype(np.float32)),
        "b": ((1,), np.dtype(np.float32)),
    }
    return [float(new["a"][0, 0]), float(new["b"][0])]


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_hostile_client_moves_the_mean(tmp_path, attack):
    evil = ATTACKS[attack]
    found = after({**HONEST, "evil": evil}, tmp_path)
    # Its weight is what it claims: (11 + 12 + 13 + 12 + 100 x) / 104.
    assert found[0] == pytest.approx((48 + 100 * float(evil["a"][0, 0])) / 104, rel=1e-6)
    assert not 11 <= found[0] <= 13


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", ROBUST)
def test_robust_rules_stay_within_the_range_of_the_honest(tmp_path, rule, attack):
    found = after({**HONEST, "evil": ATTACKS[attack]}, tmp_path, aggregation=rule)
    assert 11 <= found[0] <= 13
    assert 21 <= found[1] <= 23


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        # Sorted: 11 12 12 13 2010 and 21 22 22 23 2020.
        ({"aggregation": "median"}, [12, 22]),
        # int(0.2 * 5) = 1 left out at either end: (12 + 12 + 13) / 3, (22 + 22 + 23) / 3.
        ({"aggregation": "trimmed-mean"}, [37 / 3, 67 / 3]),
        ({"aggregation": "trimmed-mean", "trim": 0.4}, [12, 22]),
        # Squared distances of the two nearest: c0 1 + 2, c1 1 + 2, c2 2 + 5, c3 1 + 1.
        ({"aggregation": "krum"}, [12, 22]),
        # c3, then c0 before c1, whose score is the same: (12 + 11) / 2, 22.
        ({"aggregation": "multi-krum", "krum_keep": 2}, [11.5, 22]),
        # All but one: (11 + 12 + 13 + 12) / 4, every client alike whatever images it claims.
        ({"aggregation": "multi-krum"}, [12, 22]),
    ],
)
def test_rules_by_hand(tmp_path, server, expected):
    uploads = {**HONEST, "evil": ATTACKS["1000 times"]}
    assert after(uploads, tmp_path, **server) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_the_order_of_replies_changes_no_bit(tmp_path, rule):
    draw = np.random.default_rng(3)
    uploads = {
        f"c{i}": {n: draw.normal(size=v.shape).astype(np.float32) for n, v in SENT.items()}
        for i in range(5)
    }
    turned = dict(reversed(uploads.items()))
    assert after(uploads, tmp_path, aggregation=rule) == after(turned, tmp_path, aggregation=rule)


def test_a_tie_is_broken_alike_whoever_replies_first(tmp_path):
    values = {"c0": 10, "c1": 11, "c2": 13, "c3": 12, "c4": 500}
    uploads = {c: {"a": np.float32([[v]]), "b": np.float32([20])} for c, v in values.items()}
    # Squared distances of the two nearest: c1 and c3 both have 1 + 1.
    found = [
        after(order, tmp_path, aggregation="krum")
        for order in (uploads, dict(reversed(uploads.items())))
    ]
    assert found[0] == found[1]
    assert found[0] in ([11.0, 20.0], [12.0, 20.0])


def test_the_mean_without_noise_is_the_exact_weighted_mean(tmp_path):
    images = {"c0": 1, "c1": 2, "c2": 3, "c3": 1}
    experiment = parse_experiment({"clients": 4})
    new = aggregate(experiment, 1, SENT, HONEST, images, 4, Budget(experiment), tmp_path)
    expected = weighted_mean(HONEST, images)
    assert all((new[name] == expected[name]).all() for name in expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"aggregation": "krum"}, "krum needs 5 replies, a round has 4 clients"),
        ({"aggregation": "trimmed-mean"}, "trimmed-mean needs 5 replies, a round has 4"),
        ({"aggregation": "median", "fraction": 0.5}, "median needs 3 replies, a round has 2"),
        ({"aggregation": "multi-krum", "malicious": 2}, "multi-krum needs 7 replies"),
        ({"aggregation": "multi-krum", "krum_keep": 9}, "multi-krum needs 10 replies"),
        ({"aggregation": "median", "aggregate_stale": True}, "aggregate_stale with aggregation"),
        ({"aggregation": "median", "trim": 0.1}, "trim 0.1 is for aggregation trimmed-mean"),
        ({"malicious": 2}, "malicious 2 is for aggregation krum or multi-krum"),
        ({"aggregation": "krum", "krum_keep": 2}, "krum_keep 2 is for aggregation multi-krum"),
        ({"aggregation": "average"}, "aggregation"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(server, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_experiment({"clients": 4, "server": server})
    assert "\n" not in str(caught.value)
