"""Epsilon against closed forms and published values."""

from __future__ import annotations

import math

import pytest

from blend_core.accounting import delta_of, epsilon


def test_delta_of_one_round_is_the_closed_form():
    # Phi(-0.5) - e Phi(-1.5) = 0.3085375 - 2.7182818 * 0.0668072, by a table of the normal.
    assert delta_of(1.0, 1, 1.0) == pytest.approx(0.3085375 - 2.7182818 * 0.0668072, abs=1e-7)
    # Epsilon 0: the total variation distance, Phi(1/2) - Phi(-1/2).
    assert delta_of(1.0, 1, 0.0) == pytest.approx(0.3829249, abs=1e-7)


def test_the_published_noise_for_epsilon_1_and_delta_1e_5():
    # calibrateAnalyticGaussianMechanism(1.0, 1e-5, 1.0) of Balle and Wang's own code.
    assert epsilon(3.730631634816464, 1, 1e-5) == pytest.approx(1.0, abs=1e-6)


def test_rounds_compose_as_the_square_root():
    # Four rounds with noise 2 are one with noise 1.
    assert epsilon(2.0, 4, 1e-5) == pytest.approx(epsilon(1.0, 1, 1e-5), rel=1e-6)
    assert epsilon(1.0, 20, 1e-5) > epsilon(1.0, 10, 1e-5)


@pytest.mark.parametrize(
    ("noise", "rounds", "renyi"),
    # dp-accounting 0.6.0, RdpAccountant with its default orders, delta 1e-5.
    [(1.0, 20, 30.12663110385034), (1.0, 8, 16.512875946682545), (2.0, 8, 7.077391578166641)],
)
def test_a_renyi_accountant_bounds_it_from_above_and_not_by_much(noise, rounds, renyi):
    assert 0.9 * renyi < epsilon(noise, rounds, 1e-5) <= renyi


def test_the_ends_of_the_range():
    assert epsilon(1.0, 0, 1e-5) == 0.0
    assert epsilon(1e6, 1, 0.1) == 0.0
    # No overflow: mu^2 / 2 and more, for mu = sqrt(1000) / 0.01.
    assert epsilon(0.01, 1000, 1e-5) > 1000 / 0.01**2 / 2
    assert math.isfinite(epsilon(0.01, 1000, 1e-10))
