"""The worked example of the protocol, by hand."""

from __future__ import annotations

import pytest

from blend_core.metrics import client_metrics, federation_metrics, harmonic_mean

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


def test_a_client_without_test_images_is_left_out_not_counted_as_zero():
    counts = {**COUNTS, "C": {"local": [0, 0], "base": [0, 0], "novel": [0, 0]}}
    assert federation_metrics(counts)["per"] == pytest.approx(75.0)
    only = {"C": counts["C"]}
    assert federation_metrics(only)["per"] is None
    assert federation_metrics(only)["hmean"] is None


def test_harmonic_mean_of_zero_is_zero():
    assert harmonic_mean([0.0, 0.0]) == 0.0
    assert harmonic_mean([50.0, 0.0]) == 0.0
    assert harmonic_mean([60.0, 30.0]) == pytest.approx(40.0)


def test_one_client():
    found = client_metrics({"local": [1, 2], "base": [1, 4], "novel": [0, 0]})
    assert (found["per"], found["base"], found["gen"], found["hmean"]) == (50.0, 25.0, None, None)
