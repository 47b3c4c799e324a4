"""Shares p and deviations sigma of the hand example: half the squared gap on each of (1/4, 1).

E[1/sigma] = 2.5, E[1/sigma^2] = 8.5, E[sigma^2] = 0.53125.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.lab.theory import robustness as module
from acmoe.lab.theory.robustness import (
    check_clean_scale,
    check_noisy_scale,
    check_without_noise,
    clean_scale_z,
    crossing_noise,
    noisy_scale_z,
    plain_z,
)

SHARE = torch.tensor([0.5, 0.5], dtype=torch.float64)
STD = torch.tensor([0.25, 1.0], dtype=torch.float64)

deviations = st.lists(st.floats(0.01, 100), min_size=2, max_size=6)


def test_margins_without_noise_are_those_worked_out_by_hand():
    assert plain_z(SHARE, STD, 0.0).item() == pytest.approx(1 / math.sqrt(0.53125))
    assert clean_scale_z(SHARE, STD, 0.0).item() == pytest.approx(2.5)
    assert noisy_scale_z(SHARE, STD, 0.0).item() == pytest.approx(2.5)


def test_margins_under_noise_are_those_worked_out_by_hand():
    # tau = 2: 0.53125 + 4; 1 + 4 * 8.5 = 35; deviations sqrt(4.0625) and sqrt(5).
    assert plain_z(SHARE, STD, 2.0).item() == pytest.approx(1 / math.sqrt(4.53125))
    assert clean_scale_z(SHARE, STD, 2.0).item() == pytest.approx(2.5 / math.sqrt(35))
    expected = (1 / math.sqrt(4.0625) + 1 / math.sqrt(5)) / 2
    assert noisy_scale_z(SHARE, STD, 2.0).item() == pytest.approx(expected)


def test_the_crossing_is_where_the_margins_meet():
    # tau^2 = (6.25 * 0.53125 - 1) / (8.5 - 6.25) = 2.3203125 / 2.25 = 1.03125
    cross = crossing_noise(SHARE, STD)
    assert cross.item() == pytest.approx(math.sqrt(1.03125))
    torch.testing.assert_close(clean_scale_z(SHARE, STD, cross), plain_z(SHARE, STD, cross))


def test_far_beyond_the_crossing_the_margins_keep_the_ratio_of_jensen():
    ratio = clean_scale_z(SHARE, STD, 1e6) / plain_z(SHARE, STD, 1e6)
    assert ratio.item() == pytest.approx(2.5 / math.sqrt(8.5), rel=1e-9)  # below one


@settings(deadline=None, max_examples=60, derandomize=True)
@given(deviations, st.data())
def test_a_scale_from_the_noisy_tokens_never_lowers_the_margin(values, data):
    std_D = torch.tensor(values, dtype=torch.float64)
    gaps = data.draw(st.lists(st.floats(0.1, 10), min_size=len(values), max_size=len(values)))
    share_D = torch.tensor(gaps, dtype=torch.float64).square()
    share_D = share_D / share_D.sum()
    noise = data.draw(st.floats(0, 100))
    assert noisy_scale_z(share_D, std_D, noise) >= plain_z(share_D, std_D, noise) * (1 - 1e-12)


def test_proposition_1_holds_without_noise_and_with_noisy_statistics():
    for row in (check_without_noise(0), check_noisy_scale(0)):
        assert row.confirmed and row.holds_as_printed is True
        assert row.figures["least_margin_ratio"] >= 1


def test_proposition_1_reverses_in_every_mixture_with_clean_statistics():
    row = check_clean_scale(0)
    assert row.confirmed and row.holds_as_printed is False
    assert row.figures["draws_reversed_at_large_noise"] == row.figures["draws"]
    assert row.figures["worst_margin_ratio"] < 1


def test_a_closed_form_that_disagrees_with_lemma_2_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(module, "plain_z", lambda *given: 1.01 * plain_z(*given))
    for verify in (check_without_noise, check_noisy_scale, check_clean_scale):
        row = verify(0)
        assert not row.confirmed and row.holds_as_printed is None
