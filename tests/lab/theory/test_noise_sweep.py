import math

import pytest
import torch
from scipy.stats import norm

from acmoe.lab.theory.robustness import noise_sweep as module
from acmoe.lab.theory.robustness.noise_sweep import (
    LEVELS,
    ROUTERS,
    check_noise_sweep,
    crossing,
    noise_sweep,
    population_curve,
)


def test_population_curves_are_those_worked_out_by_hand():
    # Gap 2, half its square on deviations 1/4, half on 1; z = E[1/sigma] = 2.5 with the scale.
    assert population_curve("plain", 0.0) == pytest.approx(norm.sf(1 / math.sqrt(0.53125)))
    assert population_curve("clean", 0.0) == pytest.approx(norm.sf(2.5))
    assert population_curve("clean", 2.0) == pytest.approx(norm.sf(2.5 / math.sqrt(35)))
    expected = (1 / math.sqrt(4.0625) + 1 / math.sqrt(5)) / 2
    assert population_curve("noisy", 2.0) == pytest.approx(norm.sf(expected))


def test_the_crossing_of_the_example_is_the_root_of_33_over_32():
    assert crossing() == pytest.approx(math.sqrt(33 / 32))  # see the hand example of robustness
    clean, plain = population_curve("clean", crossing()), population_curve("plain", crossing())
    assert clean == pytest.approx(plain)


@pytest.fixture(scope="module")
def points():
    return noise_sweep(0)


def test_the_sweep_covers_every_router_at_every_level_and_repeats_itself(points):
    assert [(p.noise, p.router) for p in points] == [(n, r) for n in LEVELS for r in ROUTERS]
    assert all(p.low <= p.rate <= p.high for p in points)
    assert all(p.versus_plain == 0 for p in points if p.router == "plain")
    assert points == noise_sweep(0)


def test_expected_rates_are_those_of_the_true_dispersions(points):
    for point in points:
        assert point.expected == population_curve(point.router, point.noise)


def test_monte_carlo_contradicts_proposition_1_past_the_crossing(points, monkeypatch):
    monkeypatch.setattr(module, "noise_sweep", lambda seed: points)
    row = check_noise_sweep(0)
    assert row.confirmed and row.holds_as_printed is False
    assert row.figures["clean_scale_worse_at"] == [1.5, 2.0, 3.0]
    # Two tight and six loose features: 1/s = (4, 4, 1 x 6), mean 14/8; (4 + 1) / 2 / (14/8) = 10/7.
    assert row.figures["separation_gain_of_clean_scale"] == pytest.approx(10 / 7)


def test_a_library_whose_scale_is_the_identity_is_not_confirmed(monkeypatch):
    def identity(x_TD, cluster_T, count):
        return torch.ones(count, x_TD.shape[1], dtype=x_TD.dtype)

    monkeypatch.setattr(module, "measured_scale", identity)
    assert not check_noise_sweep(0).confirmed
