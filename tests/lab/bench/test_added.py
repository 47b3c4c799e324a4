"""Differences within rounds, and how sure their median is."""

import random

import pytest

from acmoe.lab.bench.harness.added import Added, added


def test_what_slows_a_whole_round_down_cancels_out() -> None:
    # One more in every round, while rounds differ by 30; 1 is 5% of the base's median.
    found = added([11.0, 21.0, 41.0], [10.0, 20.0, 40.0])
    assert found == Added(1.0, 5.0, None, None)


def test_the_interval_leaves_out_as_many_as_a_fair_coin_allows() -> None:
    # 10 rounds: at most 1 of 10 coins shows heads with chance 11/1024 = 1.1%, at most 2 with 5.5%.
    # So one difference on each side lies outside. Differences 0 to 9 ms, base 100 ms.
    found = added([100.0 + one for one in range(10)], [100.0] * 10)
    assert found == Added(4.5, 4.5, 1.0, 8.0)


@pytest.mark.parametrize(("rounds", "known"), [(2, False), (5, False), (6, True)])
def test_an_interval_needs_six_rounds(rounds: int, known: bool) -> None:
    # All above: 1/32 = 3.1% of 5 coins, 1/64 = 1.6% of 6.
    found = added([2.0] * rounds, [1.0] * rounds)
    assert (found.low_percent is not None) is known


def test_the_true_median_is_seldom_outside() -> None:
    # Skewed noise of median ln 2: 400 runs of 15 rounds, whose interval is one of at least 95%
    # (96.5%: 3 of 15 on each side); 5% of 400 are 20, and 35 would be 3.4 standard deviations.
    draw = random.Random(3)
    outside = 0
    for _ in range(400):
        noise = [draw.expovariate(1.0) - 0.6931471805599453 for _ in range(15)]
        found = added([100.0 + one for one in noise], [100.0] * 15)
        assert found.low_percent is not None and found.high_percent is not None
        outside += not found.low_percent <= 0.0 <= found.high_percent
    assert outside < 35
