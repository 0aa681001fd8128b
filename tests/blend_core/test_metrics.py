"""The worked example of the protocol, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend_core.metrics import (
    METRICS,
    best_on_test,
    client_metrics,
    federation_metrics,
    harmonic_mean,
    mean_of_last,
    zero_shot_as_published,
)
from blend_core.report.rows import Row
from blend_core.report.runs import Run

# Client A: 9 of 10 right, client B: 12 of 20; new images 50 each, 30 and 35 right.
COUNTS = {
    "A": {"local": [9, 10], "base": [80, 100], "novel": [30, 50]},
    "B": {"local": [12, 20], "base": [80, 100], "novel": [35, 50]},
}


def test_worked_example():
    found = federation_metrics(COUNTS)
    assert found["per"] == pytest.approx(75.0)
    assert found["gen"] == pytest.approx(65.0)
    assert found["hmean"] == pytest.approx(69.64, abs=0.005)
    assert found["weighted"]["per"] == pytest.approx(70.0)
    assert (found["local"], found["base"], found["novel"]) == pytest.approx((75, 80, 65))
    # 3 / (1/75 + 1/80 + 1/65)
    assert found["hm"] == pytest.approx(72.78, abs=0.005)
    assert found["weighted"]["gen"] == pytest.approx(65.0)
    # Over clients the population's deviation: 90 and 60 are 15 from 75.
    assert found["std"]["per"] == pytest.approx(15.00)
    assert (found["std"]["gen"], found["std"]["base"]) == (5.0, 0.0)


def test_h_mean_is_that_of_the_means_not_the_mean_of_the_clients_own():
    own = [client_metrics(counts)["hmean"] for counts in COUNTS.values()]
    assert sum(own) / 2 == pytest.approx(68.31, abs=0.005)
    assert federation_metrics(COUNTS)["hmean"] == pytest.approx(69.64, abs=0.005)


def test_over_seeds_the_deviation_is_the_samples():
    runs = {seed: Run(Path(), {"final": {"per": per}}) for seed, per in enumerate((90.0, 60.0))}
    assert Row("", {}, runs).std("per") == pytest.approx(21.21, abs=0.005)


def test_a_client_without_test_images_is_left_out_not_counted_as_zero():
    counts = {**COUNTS, "C": {"local": [0, 0], "base": [0, 0], "novel": [0, 0]}}
    assert federation_metrics(counts)["per"] == pytest.approx(75.0)
    only = {"C": counts["C"]}
    assert federation_metrics(only)["per"] is None
    assert federation_metrics(only)["hmean"] is None
    assert federation_metrics(only)["weighted"]["per"] is None
    assert federation_metrics(only)["std"]["per"] is None
    assert federation_metrics(counts)["std"]["per"] == pytest.approx(15.0)
    # Without novel images at all, as on CIFAR and the domain sets.
    closed = {name: {**found, "novel": [0, 0]} for name, found in COUNTS.items()}
    found = federation_metrics(closed)
    assert (found["per"], found["gen"], found["hmean"], found["hm"]) == (75.0, None, None, None)


def test_harmonic_mean_of_zero_is_zero():
    assert harmonic_mean([0.0, 0.0]) == 0.0
    assert harmonic_mean([50.0, 0.0]) == 0.0
    assert harmonic_mean([60.0, 30.0]) == pytest.approx(40.0)


def test_one_client():
    found = client_metrics({"local": [1, 2], "base": [1, 4], "novel": [0, 0]})
    assert (found["per"], found["base"], found["gen"], found["hmean"]) == (50.0, 25.0, None, None)


def test_zero_shot_as_published_is_over_all_test_images():
    counts = {
        "A": {"local": [9, 10], "base": [30, 40], "novel": [10, 40]},
        "B": {"local": [12, 20], "base": [30, 60], "novel": [20, 60]},
    }
    # 60 of 100 base, 30 of 100 new images; 2 x 60 x 30 / 90. Client means: 62.5 and 29.17.
    found = zero_shot_as_published(counts)
    assert found == {"per": 60.0, "gen": 30.0, "hmean": pytest.approx(40.0)}
    assert federation_metrics(counts)["base"] == 62.5
    nothing = {"A": {"local": [0, 0], "base": [0, 0], "novel": [0, 0]}}
    assert zero_shot_as_published(nothing) == {"per": None, "gen": None, "hmean": None}


def evaluations(*local: float | None) -> dict[int, dict[str, float | None]]:
    """After rounds 1, 2, ...: Local as given, all other metrics 10."""
    return {r: {**dict.fromkeys(METRICS, 10.0), "local": v} for r, v in enumerate(local, 1)}


def test_the_last_five_evaluations_are_averaged_and_fewer_are_not():
    found = mean_of_last(evaluations(0.0, 50.0, 60.0, 70.0, 80.0, 90.0))
    assert (found["local"], found["gen"], found["reason"]) == (70.0, 10.0, None)
    assert found["after_rounds"] == [2, 3, 4, 5, 6]
    few = mean_of_last(evaluations(50.0, 60.0))
    assert (few["local"], few["after_rounds"]) == (None, [1, 2])
    assert few["reason"] == "2 of 5 evaluations of all clients"
    assert mean_of_last(evaluations(1.0, None, 3.0, 4.0, 5.0))["local"] is None


def test_the_best_round_on_test_images_is_the_latest_of_equals_with_its_optimism():
    found = evaluations(40.0, 70.0, 70.0, 60.0)
    best = best_on_test(found, found[4])
    assert (best["model_after_round"], best["local"], best["chosen_from"]) == (3, 70.0, 4)
    assert (best["optimism"]["local"], best["optimism"]["gen"]) == (10.0, 0.0)
    none = best_on_test(evaluations(None), evaluations(None)[1])
    assert (none["model_after_round"], none["local"], none["chosen_from"]) == (None, None, 0)
    assert none["optimism"] == dict.fromkeys(METRICS)
