"""Differences, groups and paired seeds, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acmoe.report.compare import difference, paired
from acmoe.report.groups import groups
from run_facts import run_facts


def test_finished_runs_differ_by_their_best_values() -> None:
    found = difference(run_facts({10: 3.0, 20: 1.5}), run_facts({10: 2.0, 20: 2.5}))
    assert found is not None
    assert (found.value, found.percent, found.step) == (-0.5, -25.0, None)


def test_an_unfinished_run_is_compared_at_the_last_step_both_have() -> None:
    going = run_facts({10: 3.0, 20: 2.8}, steps=100)
    found = difference(going, run_facts({10: 2.5, 30: 1.0}))
    assert found is not None
    assert (found.value, found.step) == (0.5, 10)


def test_runs_without_a_common_figure_have_no_difference() -> None:
    assert difference(run_facts({10: 1.0}), run_facts({10: 1.0}, key="top1")) is None
    assert difference(run_facts({}), run_facts({10: 1.0})) is None
    assert difference(run_facts({5: 1.0}, steps=9), run_facts({10: 1.0})) is None


def test_seed_router_and_place_of_the_data_do_not_part_a_group() -> None:
    same = run_facts({1: 1.0}, **{"data.folder": "a"})
    other = run_facts({1: 1.0}, router="adaptive", seed=3, **{"data.folder": "b"})
    apart = run_facts({1: 1.0}, lr=0.2)
    assert groups([same, other, apart, same]) == [0, 0, 1, 0]


def test_one_seed_has_no_interval_and_tells_nothing() -> None:
    (pair,) = paired([run_facts({1: 2.0}), run_facts({1: 1.0}, router="adaptive")])
    assert (pair.difference, pair.percent) == (-1.0, -50.0)
    assert pair.low is None and pair.first_spread is None
    assert not pair.told_from_chance


def test_paired_seeds_give_the_t_interval_of_the_differences() -> None:
    plain = [run_facts({1: value}, seed=seed) for seed, value in enumerate((2.0, 3.0, 4.0))]
    other = [
        run_facts({1: value}, seed=seed, router="adaptive")
        for seed, value in enumerate((1.9, 2.8, 3.7))
    ]
    (pair,) = paired([*plain, *other])
    # Differences -0.1, -0.2, -0.3: mean -0.2, deviation 0.1, error 0.1 / sqrt(3); t(2) = 4.3027.
    half = 4.3026527 * 0.1 / math.sqrt(3)
    assert pair.difference == pytest.approx(-0.2)
    assert (pair.low, pair.high) == (pytest.approx(-0.2 - half), pytest.approx(-0.2 + half))
    assert not pair.told_from_chance  # -0.448 to +0.048
    assert pair.first_spread == pytest.approx(1.0)
    assert pair.seeds == (0, 1, 2)


def test_only_seeds_that_both_routers_finished_are_paired() -> None:
    runs = [
        run_facts({1: 2.0}, seed=0),
        run_facts({1: 2.0}, seed=1),
        run_facts({1: 1.0}, seed=1, router="adaptive"),
        run_facts({1: 1.0}, seed=0, router="adaptive", steps=50),
        run_facts({1: 1.0}, seed=7, router="adaptive"),
    ]
    (pair,) = paired(runs)
    assert pair.seeds == (1,)


def test_runs_that_differ_in_more_than_the_router_are_never_paired() -> None:
    assert paired([run_facts({1: 2.0}), run_facts({1: 1.0}, router="adaptive", lr=0.2)]) == []


@given(
    values=st.lists(st.tuples(st.floats(0.5, 5), st.floats(0.5, 5)), min_size=2, max_size=6),
    shift=st.floats(-2, 2),
)
def test_a_shift_of_both_routers_leaves_the_paired_difference(
    values: list[tuple[float, float]], shift: float
) -> None:
    def compared(by: float) -> tuple[float, float | None]:
        one = [run_facts({1: a + by}, seed=n) for n, (a, _) in enumerate(values)]
        two = [run_facts({1: b + by}, seed=n, router="adaptive") for n, (_, b) in enumerate(values)]
        (pair,) = paired([*one, *two])
        return pair.difference, pair.low

    assert compared(shift) == pytest.approx(compared(0.0), abs=1e-9)
