import math

import pytest
import torch
from scipy.stats import binomtest, norm

from acmoe.lab.theory.intervals import family_z, paired_z, wilson


@pytest.mark.parametrize(("errors", "trials"), [(0, 40), (3, 40), (40, 40), (1234, 100_000)])
def test_wilson_interval_is_that_of_scipy(errors, trials):
    expected = binomtest(errors, trials).proportion_ci(confidence_level=0.99, method="wilson")
    low, high = wilson(errors, trials, norm.ppf(0.995))
    assert low == pytest.approx(expected.low, abs=1e-12)
    assert high == pytest.approx(expected.high, abs=1e-12)


def test_no_error_in_a_hundred_still_leaves_an_upper_end():
    # With no error the upper end is z^2 / (n + z^2): 4 / 104 at z = 2.
    low, high = wilson(0, 100, 2.0)
    assert low == pytest.approx(0, abs=1e-15) and high == pytest.approx(4 / 104)


def test_one_interval_at_five_percent_uses_the_textbook_quantile():
    assert family_z(1, level=0.05) == pytest.approx(1.959963984540054)


def test_ten_intervals_share_their_level():
    assert family_z(10, level=0.05) == pytest.approx(norm.ppf(1 - 0.05 / 20))


def test_paired_statistic_counts_only_tokens_on_which_the_two_differ():
    first_T = torch.tensor([True] * 9 + [False] + [True] * 50 + [False] * 50)
    second_T = torch.tensor([False] * 9 + [True] + [True] * 50 + [False] * 50)
    assert paired_z(first_T, second_T) == pytest.approx((9 - 1) / math.sqrt(10))
    assert paired_z(second_T, first_T) == pytest.approx(-8 / math.sqrt(10))
    assert paired_z(first_T, first_T) == 0.0
