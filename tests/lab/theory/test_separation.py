import pytest
import torch

from acmoe.lab.theory.robustness.separation import (
    COUNTEREXAMPLES,
    check_separation,
    check_separation_fails,
    counterexample_gains,
    ordered_draws,
    separation_gain,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_gain_weighs_the_squared_gap_by_the_scale():
    # (1.5 * 4 + 0.5 * 1) / (4 + 1)
    assert separation_gain(tensor(1.5, 0.5), tensor(2.0, -1.0)).item() == pytest.approx(1.3)


def test_counterexamples_are_those_worked_out_by_hand():
    gains = list(counterexample_gains().values())
    assert gains == pytest.approx([0.2, 0.294118, 0.382734], abs=1e-6)
    # The third meets the proof: two features hold all of the scale but 0.01 of 4.
    std, gap, _ = COUNTEREXAMPLES["the proof's own hypotheses"]
    scale = [1 / s for s in std]
    assert sum(scale) == pytest.approx(4) and sum(scale[:2]) > 3.98
    assert min(gap[:2]) > max(gap[2:])


def test_drawn_lists_are_similarly_ordered_and_may_be_nearly_constant():
    std_XD, gap_XD = ordered_draws(torch.Generator().manual_seed(0), 1e-3, 20, 4)
    assert (std_XD.diff(dim=-1) <= 0).all() and (gap_XD.diff(dim=-1) >= 0).all()
    assert (std_XD - 1).abs().max() < 3e-3


def test_lemma_1_holds_for_similar_order_and_fails_as_printed():
    proved, fails = check_separation(0), check_separation_fails(0)
    assert proved.confirmed and proved.holds_as_printed is None
    assert 1 <= proved.figures["least_gain"] < 1 + 1e-9
    assert 1 - 1e-9 < proved.figures["largest_gain_in_reverse_order"] <= 1
    assert fails.confirmed and fails.holds_as_printed is False
