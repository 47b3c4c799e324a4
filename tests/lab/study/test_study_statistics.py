"""Means, spreads and tests, against hand-worked numbers, scipy and their own symmetries."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from acmoe.errors import UserError
from acmoe.evaluate.seeds import Spread, holm, paired_difference, sign_flip_p
from acmoe.lab.study.results import statistics

numbers = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))


def test_the_place_of_version_0_1_serves_its_names_with_a_warning():
    with pytest.warns(FutureWarning, match="is now acmoe.evaluate.seeds.paired_difference"):
        assert statistics.paired_difference is paired_difference
    with pytest.raises(AttributeError, match="no attribute 'median'"):
        _ = statistics.median


def by_seed(values):
    return dict(enumerate(values))


def test_a_spread_is_mean_and_sample_deviation():
    # Mean 4; squared deviations 9 + 1 + 16 = 26 by n - 1 = 2 is 13.
    assert Spread.of([1.0, 5.0, 8.0 - 2.0]).mean == 4.0
    assert Spread.of([1.0, 3.0, 8.0]).std == pytest.approx(math.sqrt(13))
    assert Spread.of([2.0]).std is None
    with pytest.raises(UserError, match="run the study first"):
        Spread.of([])


def test_a_figure_that_is_not_finite_is_named_with_its_seed():
    with pytest.raises(UserError, match=r"seed 4 has the figures nan and 1\.0"):
        paired_difference({3: 1.0, 4: float("nan")}, {3: 1.0, 4: 1.0})


def test_a_paired_difference_worked_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1, error 1/sqrt(3), t = 3.4641 with 2 degrees of
    # freedom: p = 0.0742; the interval is 2 +- 4.3027 / 1.7321 = 2 +- 2.4841. All three signs agree
    # in 2 of 8 patterns.
    found = paired_difference(by_seed([2.0, 4.0, 6.0]), by_seed([1.0, 2.0, 3.0]))
    assert found is not None
    assert (found.n, found.mean, found.std) == (3, 2.0, 1.0)
    assert found.low == pytest.approx(-0.4841, abs=1e-4)
    assert found.high == pytest.approx(4.4841, abs=1e-4)
    assert found.p_t == pytest.approx(0.0742, abs=1e-4)
    assert found.p_flip == 0.25


def test_only_seeds_both_conditions_have_are_paired():
    found = paired_difference({0: 5.0, 1: 7.0, 9: 100.0}, {1: 6.0, 0: 5.5, 3: -100.0})
    assert found is not None
    assert found.n == 2
    assert found.mean == pytest.approx((-0.5 + 1.0) / 2)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_a_difference_and_no_interval():
    found = paired_difference({0: 3.0}, {0: 1.0})
    assert found is not None
    assert (found.mean, found.std, found.low, found.high, found.p_t) == (
        2.0,
        None,
        None,
        None,
        None,
    )
    assert found.p_flip == 1.0  # +2 and -2 are equally far from 0


@pytest.mark.parametrize("raised", [[2.0, 3.0], [2.0, 3.0, 4.0], [2.0, 3.5]])
def test_two_pairs_or_equal_differences_have_no_interval_and_no_t_test(raised):
    """Two accuracies of 256 images that happen to differ alike are not certain of anything."""
    found = paired_difference(by_seed(raised), by_seed([1.0, 2.0, 3.0][: len(raised)]))
    assert found is not None
    assert (found.low, found.high, found.p_t) == (None, None, None)
    assert found.p_flip == 2 / 2 ** len(raised)  # all of one sign, or all of the other


def test_differences_that_are_equal_but_for_rounding_have_no_t_test():
    """Three more hits of 266 images in every seed: percentages round to other last digits."""
    plain = by_seed([100 * hits / 266 for hits in (187, 198, 174)])
    raised = by_seed([100 * hits / 266 for hits in (190, 201, 177)])
    assert len({raised[seed] - plain[seed] for seed in plain}) > 1
    found = paired_difference(raised, plain)
    assert found is not None
    assert (found.low, found.high, found.p_t, found.p_flip) == (None, None, None, 0.25)


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=8))
def test_the_paired_t_test_is_scipys(pairs):
    left, right = (np.array(side) for side in zip(*pairs, strict=True))
    if (left - right).std() < 1e-6:  # scipy loses all digits there
        return
    found = paired_difference(by_seed(left.tolist()), by_seed(right.tolist()))
    expected = stats.ttest_rel(left, right)
    interval = expected.confidence_interval(0.95)
    assert found is not None
    assert found.p_t == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert found.low == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert found.high == pytest.approx(interval.high, rel=1e-6, abs=1e-9)


def test_the_sign_flip_test_counts_every_pattern():
    # |sum| = 4 of 1, -1, 4: patterns of 1, 1, 4 reach 6, 4, 4, 2 and their mirrors: 6 of 8.
    assert sign_flip_p([1.0, -1.0, 4.0]) == 6 / 8
    assert sign_flip_p([0.1] * 5) == 2 / 32


@given(st.lists(numbers, min_size=1, max_size=9), st.randoms())
def test_the_sign_flip_test_knows_neither_order_nor_direction_nor_unit(differences, random):
    p = sign_flip_p(differences)
    shuffled = random.sample(differences, len(differences))
    assert sign_flip_p(shuffled) == p
    assert sign_flip_p([-value for value in differences]) == p
    assert sign_flip_p([4 * value for value in differences]) == p
    assert 2 / 2 ** len(differences) <= p + 1e-12 <= 1 + 1e-12


def test_many_pairs_are_sampled_the_same_way_every_time():
    differences = np.random.default_rng(3).normal(0.5, 1.0, size=20).tolist()
    exact = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=50_000, rng=1
    ).pvalue
    assert sign_flip_p(differences) == sign_flip_p(differences)
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.01)


def test_holm_worked_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, and 0.04 raised to 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("odd", [None, float("nan"), 1.5, -0.1])
def test_holm_refuses_what_is_no_p_value(odd):
    # A NaN in front made all corrected values 1.0, one at the end left the others as they were.
    with pytest.raises(UserError, match=r"p_values\[1\]=.*leave out comparisons without a test"):
        holm([0.01, odd, 0.04])


def test_a_paired_difference_takes_tensors_and_numbers_of_numpy():
    values = {0: torch.tensor(1.0), 1: np.float32(2.5), 2: 4}
    found = paired_difference(values, {0: 0.5, 1: torch.tensor(1.0), 2: np.int64(1)})
    assert found == paired_difference({0: 1.0, 1: 2.5, 2: 4.0}, {0: 0.5, 1: 1.0, 2: 1.0})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_a_p_nor_changes_their_order(p_values):
    corrected = holm(p_values)
    assert all(after >= before for before, after in zip(p_values, corrected, strict=True))
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    raised = [corrected[place] for place in order]
    assert raised == sorted(raised)
    assert max(corrected) <= 1
