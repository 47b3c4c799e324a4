"""How far M is from the identity against what a router changes: small cases worked out by hand."""

import math
from itertools import permutations, product

import numpy as np
import pytest

from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.scale_effect import Point, plain_of, points_of, scale_effect
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.results.tables import study_markdown
from study_cases import record

ABLATIONS = STUDIES["ablations"]


def run(condition, seed, test, distance=None):
    metrics = {"test": test} if distance is None else {"test": test, "scale_rms_log": distance}
    return record(condition, seed, test, study="ablations", setting="s", metrics=metrics)


def group_of(*records):
    (group,) = summarise(ABLATIONS, records).groups
    return group


def test_a_change_is_that_from_the_plain_run_of_the_same_seed_in_percent():
    group = group_of(
        run("smoe", 0, 2.0),
        run("smoe", 1, 4.0),
        run("adaptive", 0, 2.1, 0.3),
        run("adaptive", 1, 4.0, 0.4),
        run("variance", 1, 3.0, 0.5),
        run("variance", 2, 3.0, 0.5),  # no plain run of seed 2
        run("std", 0, 3.0, 0.0),  # M faded to the identity
    )
    block = group.title
    expected = [((block, 0), 0.3, 5.0), ((block, 1), 0.4, 0.0), ((block, 1), 0.5, -25.0)]
    found = points_of(ABLATIONS, group)
    assert [(point.block, point.distance) for point in found] == [one[:2] for one in expected]
    assert [point.change for point in found] == pytest.approx([one[2] for one in expected])


def test_plain_is_the_first_without_a_scale_along_the_comparisons():
    group = group_of(
        run("smoe", 0, 2.0),
        run("threshold", 0, 2.0),
        run("adaptive", 0, 2.0, 0.3),
        run("variance", 0, 2.0, 0.3),
        run("threshold-adaptive", 0, 2.0, 0.3),
    )
    assert plain_of(ABLATIONS, group, "variance") == "smoe"  # by way of adaptive
    assert plain_of(ABLATIONS, group, "threshold-adaptive") == "threshold"
    assert plain_of(ABLATIONS, group, "threshold") is None


def test_a_line_through_every_block_is_found_whatever_the_blocks_heights():
    # change = 20 distance + the block's own height: 2 % for each 0.1.
    heights = {("a", 0): 0.0, ("a", 1): 50.0, ("b", 0): -7.0}
    points = [
        Point(block, x, 20 * x + heights[block]) for block in heights for x in (0.1, 0.2, 0.4)
    ]
    found = scale_effect(points)
    assert found.slope == pytest.approx(2.0)
    assert found.correlation == pytest.approx(1.0)
    assert (found.runs, found.blocks, found.least, found.most) == (9, 3, 0.1, 0.4)
    # One of the 6^3 orders gives +1, and none gives -1: 1 / 216 = 0.0046, which is sampled.
    assert found.p == pytest.approx(1 / 216, abs=0.003)


def test_p_is_the_share_of_all_orders_within_blocks():
    points = [Point(("a", 0), 0.1, 1.0), Point(("a", 0), 0.2, 3.0), Point(("a", 0), 0.5, 2.0)]
    points += [Point(("a", 1), 0.3, 0.0), Point(("a", 1), 0.4, 1.0)]
    blocks = [points[:3], points[3:]]

    def joint(orders):
        total = 0.0
        for block, order in zip(blocks, orders, strict=True):
            mean_x = math.fsum(point.distance for point in block) / len(block)
            mean_y = math.fsum(point.change for point in block) / len(block)
            for place, point in zip(order, block, strict=True):
                total += (block[place].distance - mean_x) * (point.change - mean_y)
        return total

    seen = joint([range(3), range(2)])
    every = [joint(orders) for orders in product(permutations(range(3)), permutations(range(2)))]
    exact = sum(abs(one) >= abs(seen) - 1e-12 for one in every) / len(every)
    assert scale_effect(points).p == pytest.approx(exact, abs=0.02)


def test_unrelated_figures_are_seldom_called_related():
    generator = np.random.default_rng(3)
    called = 0
    for _ in range(60):
        drawn = generator.normal(size=(4, 5, 2))
        points = [
            Point(("s", seed), *map(float, pair)) for seed in range(4) for pair in drawn[seed]
        ]
        called += scale_effect(points).p < 0.05
    assert called <= 8  # 3 expected; more than 8 of 60 has probability 0.003


def test_runs_without_company_in_their_block_say_nothing():
    assert scale_effect([]) is None
    assert scale_effect([Point(("a", seed), 0.1 * seed, 1.0 * seed) for seed in range(4)]) is None
    assert scale_effect([Point(("a", 0), 0.2, 1.0), Point(("a", 0), 0.2, 2.0)]) is None
    # Two runs of one block always lie on a line.
    assert scale_effect([Point(("a", 0), 0.2, 1.0), Point(("a", 0), 0.3, 2.0)]) is None


def test_the_page_tells_slope_correlation_and_p_where_there_are_runs_for_it():
    changes = (("adaptive", 0.3, 0.1), ("variance", 0.5, 0.2), ("std", 0.2, 0.05))
    records = [run("smoe", seed, 2.0) for seed in (0, 1)]
    alone = [*records, run("adaptive", 0, 2.1, 0.3)]
    records += [run(name, seed, 2.0 + y, x) for name, x, y in changes for seed in (0, 1)]
    page = study_markdown(summarise(ABLATIONS, records), [])
    assert "far from the identity" in page
    # x - mean: -1/30, 5/30, -4/30; y in percent - mean: -5/6, 25/6, -20/6: 2.5 % for each 0.1.
    assert "| all of them |" not in page  # one setting is all
    assert "| 6 | 2 | 0.200 to 0.500 | +2.50 | +1.00 |" in page
    assert "far from the identity" not in study_markdown(summarise(ABLATIONS, alone), [])
