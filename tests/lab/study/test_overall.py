"""A comparison over settings: small cases worked out by hand, and an independent computation."""

import math
from statistics import fmean, variance

import pytest
from scipy import stats

from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.overall import mean_of_settings, overall
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.results.tables import study_markdown
from study_cases import record

BYTES = STUDIES["bytes"]


def test_every_setting_counts_alike_however_many_pairs_it_has():
    seen = mean_of_settings([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])
    # Means 2 and 0. Each setting's mean has variance 1/3, their mean (1/3 + 1/3) / 4 = 1/6; equal
    # spreads of 2 + 2 degrees of freedom: t = 2.7764, and 2.7764 * sqrt(1/6) = 1.1335.
    assert (seen.settings, seen.pairs, seen.above) == (2, 6, 4)
    assert seen.mean == pytest.approx(1.0)
    assert (seen.low, seen.high) == pytest.approx((1 - 1.1335, 1 + 1.1335), abs=1e-4)
    more = mean_of_settings([[1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])
    assert (more.pairs, more.mean) == (9, pytest.approx(1.0))


def test_unequal_spreads_have_welchs_degrees_of_freedom():
    settings = [[0.5, 2.5, 4.0, 1.0, 0.0], [0.1, 0.2, 0.4], [-3.0, -1.0, -2.5, -2.0]]
    parts = [variance(one) / len(one) for one in settings]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(one) - 1) for part, one in zip(parts, settings, strict=True)
    )
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts)) / 3
    middle = fmean(fmean(one) for one in settings)
    seen = mean_of_settings(settings)
    assert (seen.low, seen.high) == pytest.approx((middle - reach, middle + reach), rel=1e-9)


def test_settings_whose_spread_is_unknown_do_not_count():
    known = [[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]]
    alone = mean_of_settings(known)
    assert mean_of_settings([*known, [9.0, 8.0], [7.0, 7.0, 7.0], []]) == alone
    assert mean_of_settings([known[0], [9.0, 8.0]]) is None
    equal = [100 * (hits + 3) / 266 - 100 * hits / 266 for hits in (187, 198, 174)]
    assert len(set(equal)) > 1  # by rounding
    assert mean_of_settings([*known, equal]) == alone


def _run(setting, condition, seed, figure):
    digest = f"{setting}-{condition}-{seed}"
    return record(condition, seed, figure, setting=setting, digest=digest)


def _runs(setting, changes):
    """Plain runs of 1, 2 and 3, whose mean is 2, and adaptive ones that differ by so much."""
    plain = [_run(setting, "smoe", seed, 1.0 + seed) for seed in range(3)]
    return plain + [
        _run(setting, "adaptive-previous", seed, 1.0 + seed + change)
        for seed, change in enumerate(changes)
    ]


def test_the_page_tells_it_in_percent_of_the_baselines_mean():
    records = [*_runs("a", (0.02, 0.04, 0.06)), *_runs("b", (-0.02, 0.0, 0.02))]
    summary = summarise(BYTES, records)
    assert set(overall(BYTES, summary.groups)) == {("adaptive-previous", "smoe")}
    page = study_markdown(summary, [])
    # 1, 2 and 3 % of 2, and -1, 0 and 1 %: the case above.
    assert "All settings together, in test bits per byte" in page
    assert "| adaptive-previous | smoe | 2 | 6 | 4 | +1.00 [-0.13, +2.13] |" in page


def test_one_setting_is_no_whole_and_figures_of_two_units_have_none():
    assert "All settings together" not in study_markdown(
        summarise(BYTES, _runs("a", (0.02, 0.04, 0.06))), []
    )
    nano = STUDIES["nano"]
    text, images = (metric.setting for metric in nano.primary)
    lines = [
        {**line, "study": "nano"}
        for line in [*_runs(text, (0.02, 0.04, 0.06)), *_runs(images, (-0.02, 0.0, 0.02))]
    ]
    groups = summarise(nano, lines).groups
    assert len(groups) == 2
    assert overall(nano, groups) == {}
