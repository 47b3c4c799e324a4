"""Shares p and deviations sigma of the hand example: half the squared gap on each of (1/4, 1).

E[1/sigma] = 2.5, E[1/sigma^2] = 8.5, E[sigma^2] = 0.53125.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.lab.theory.robustness import margins as module
from acmoe.lab.theory.robustness.margins import beyond_two, check_without_noise, metric_z, power_z
from acmoe.lab.theory.robustness.noise import (
    check_clean_scale,
    check_contaminated_share,
    check_noisy_scale,
    contaminated_ratio,
    contaminated_scale,
    crossing_noise,
    margin_ratio,
)
from acmoe.lab.theory.scale import exact_scale

SHARE = torch.tensor([0.5, 0.5], dtype=torch.float64)
STD = torch.tensor([0.25, 1.0], dtype=torch.float64)
GAP = 2 * SHARE.sqrt()  # of length 2, so that margins are z
ONE = torch.ones(2, dtype=torch.float64)

deviations = st.lists(st.floats(0.01, 100), min_size=2, max_size=6)


def test_margins_without_noise_are_those_worked_out_by_hand():
    assert metric_z(GAP, STD, ONE).item() == pytest.approx(1 / math.sqrt(0.53125))
    assert metric_z(GAP, STD, 1 / STD).item() == pytest.approx(2.5)
    assert metric_z(GAP, STD, 1 / STD**2).item() == pytest.approx(math.sqrt(8.5))
    for power, wanted in ((0.0, 1 / math.sqrt(0.53125)), (1.0, 2.5), (2.0, math.sqrt(8.5))):
        assert power_z(SHARE, STD, power).item() == pytest.approx(wanted)


def test_margins_under_noise_are_those_worked_out_by_hand():
    # tau = 2: 0.53125 + 4; 1 + 4 * 8.5 = 35; deviations sqrt(4.0625) and sqrt(5).
    clean = margin_ratio(GAP, STD, 2.0, exact_scale(STD)).item()
    assert clean == pytest.approx(2.5 / math.sqrt(35) * math.sqrt(4.53125))
    total = torch.tensor([4.0625, 5.0], dtype=torch.float64).sqrt()
    noisy = margin_ratio(GAP, STD, 2.0, exact_scale(total)).item()
    expected = (1 / math.sqrt(4.0625) + 1 / math.sqrt(5)) / 2
    assert noisy == pytest.approx(expected * math.sqrt(4.53125))


def test_the_crossing_is_where_the_margins_meet():
    # tau^2 = (6.25 * 0.53125 - 1) / (8.5 - 6.25) = 2.3203125 / 2.25 = 1.03125
    cross = crossing_noise(SHARE, STD)
    assert cross.item() == pytest.approx(math.sqrt(1.03125)) == pytest.approx(1.0155, abs=1e-4)
    assert margin_ratio(GAP, STD, cross, exact_scale(STD)).item() == pytest.approx(1)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(deviations, st.data())
def test_the_margin_grows_with_the_power_up_to_two_and_falls_beyond(values, data):
    std_D = torch.tensor(values, dtype=torch.float64)
    gaps = data.draw(st.lists(st.floats(0.1, 10), min_size=len(values), max_size=len(values)))
    share_D = torch.tensor(gaps, dtype=torch.float64).square()
    share_D = share_D / share_D.sum()
    low, high = sorted(data.draw(st.tuples(st.floats(0, 2), st.floats(0, 2))))
    z = [power_z(share_D, std_D, power).item() for power in (low, high, 4 - high, 4 - low)]
    assert z[0] <= z[1] * (1 + 1e-9) and z[3] <= z[2] * (1 + 1e-9)


def test_beyond_two_the_example_by_hand_errs_more_than_plain():
    assert beyond_two() == pytest.approx(1.0999 / math.sqrt(1.9999) * math.sqrt(0.999901), rel=1e-6)


def test_with_few_noisy_tokens_the_margin_falls_below_the_plain_one():
    # s = 0.9 sigma + 0.1 total, exactly the mean absolute deviations of the drawn-up tokens.
    total_D = (STD.square() + 4).sqrt()
    torch.testing.assert_close(contaminated_scale(2.0, 10), exact_scale(0.9 * STD + 0.1 * total_D))
    assert contaminated_ratio(1.0, 1.5) > 1  # all tokens noisy: the proved case
    row = check_contaminated_share(0)
    assert row.figures["least_margin_ratio_0.1"] == pytest.approx(0.945, abs=2e-3)
    assert row.figures["least_margin_ratio_0.025"] == pytest.approx(0.90, abs=2e-3)


def test_rows_without_and_with_noise_say_what_is_proved_and_what_fails():
    for row in (check_without_noise(0, draws=50), check_noisy_scale(0, draws=50)):
        assert row.confirmed and row.basis == "proof" and row.holds_as_printed is None
        assert row.figures["least_margin_ratio"] >= 1
    clean = check_clean_scale(0)
    assert clean.confirmed and clean.holds_as_printed is False
    assert clean.figures["draws_reversed_above_their_crossing"] == clean.figures["draws"]


def test_a_wrong_margin_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(module, "power_z", lambda *given: 1.01 * power_z(*given))
    row = check_without_noise(0, draws=20)
    assert not row.confirmed and row.holds_as_printed is None
