"""Evidence from records: pooled intervals by hand, pairs, and verdicts."""

import math
from statistics import variance
from typing import Any

import pytest
from evidence_cases import CLAIM, record
from scipy import stats

from acmoe.errors import UserError
from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.evidence.page import evidence_markdown
from acmoe.lab.study.evidence.rows import Row, differences, evidence_rows
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.difference_curves import difference_curve
from acmoe.lab.study.results.pooled import PooledDifference, detectable_errors, pooled_differences
from acmoe.lab.study.results.summary import Group


def test_intervals_share_one_standard_deviation() -> None:
    few, many = [1.0, 1.1], [0.0, 2.0, 4.0]
    found = pooled_differences({"few": few, "many": many, "none": []})
    std = math.sqrt((variance(few) + 2 * variance(many)) / 3)  # 3 = 1 + 2 degrees of freedom
    reach = stats.t.ppf(0.975, 3) * std / math.sqrt(2)
    assert found["few"].n == 2
    assert found["few"].mean == pytest.approx(1.05)
    assert found["few"].low == pytest.approx(1.05 - reach)
    assert found["few"].high == pytest.approx(1.05 + reach)
    seen = found["many"].detectable
    assert seen is not None
    errors = seen / (std / math.sqrt(3))  # the power is that of a noncentral t
    assert stats.nct.sf(stats.t.ppf(0.975, 3), 3, errors) == pytest.approx(0.8)
    assert "none" not in found


@pytest.mark.parametrize("freedom", [2, 3, 14, 100])
def test_the_detectable_difference_has_a_power_of_80_percent(freedom: int) -> None:
    found = stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, detectable_errors(freedom))
    assert found == pytest.approx(0.8, abs=1e-9)


def test_two_pairs_alone_have_no_interval() -> None:
    """One degree of freedom: the limit of t is 12.7, and two pairs may agree by chance."""
    assert pooled_differences({"a": [1.0, 1.1]})["a"] == (2, pytest.approx(1.05), None, None, None)


def test_single_pairs_have_no_interval() -> None:
    assert pooled_differences({"a": [1.5]}) == {"a": PooledDifference(1, 1.5, None, None, None)}


def test_pairs_that_are_equal_but_for_rounding_have_no_interval() -> None:
    differences = [100 * (hits + 3) / 266 - 100 * hits / 266 for hits in (187, 198, 174)]
    assert len(set(differences)) > 1
    found = pooled_differences({"a": differences, "b": [1.0]})
    assert (found["a"].n, found["a"].low, found["a"].detectable) == (3, None, None)
    assert found["b"].high is None


def test_differences_are_paired_and_in_percent_of_the_plain_mean() -> None:
    records = [
        record("smoe", 0, 2.0),
        record("smoe", 1, 3.0),
        record("adaptive-previous", 0, 2.1),
        record("adaptive-previous", 1, 2.9),
        record("adaptive-previous", 7, 9.0),  # no plain run with this seed
        record("smoe", 2, 1.0, status="failed"),
        record("smoe", 0, 5.0, setting="b"),
    ]
    assert differences(CLAIM, "a", records) == pytest.approx([4.0, -4.0])  # 0.1 of 2.5
    rows = evidence_rows([CLAIM], {"long": records})
    assert [row.setting for row in rows] == ["a", "b"]
    assert rows[0].share == pytest.approx(0.1)
    assert rows[1].verdict == "never run"


def test_runs_of_other_sizes_or_models_are_no_pair() -> None:
    """A short trial that was written into the same file last would take the long run's place."""
    plain, longer = record("smoe", 0, 2.0), record("adaptive-previous", 0, 2.1)
    trial = record("adaptive-previous", 1, 4.0, size="6 steps of 100 tokens")
    with pytest.raises(UserError, match=r"long, a has runs of 1,000 steps .* and of 6 steps"):
        differences(CLAIM, "a", [plain, longer, trial])
    wide = {"config": {"model": {"dim": 64}}}
    narrow = {"config": {"model": {"dim": 16}}}
    with pytest.raises(UserError, match=r"config\.model\.dim=64, and adaptive-previous has 16"):
        differences(CLAIM, "a", [{**plain, **wide}, {**longer, **narrow}])


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        (-4.0, 1.0, "refuted"),  # the paper's -5 % lies below the interval
        (-6.0, 1.0, "undecided"),
        (-6.0, -1.0, "supported"),
        (0.5, 1.0, "refuted"),
        (None, None, "unknown"),
    ],
)
def test_verdicts(low: float | None, high: float | None, verdict: str) -> None:
    ours = PooledDifference(3, 0.0, low, high, None)
    assert Row(claim=CLAIM, setting="a", ours=ours, share=0.1).verdict == verdict


def test_a_row_is_in_exactly_one_list() -> None:
    rows = [
        Row(claim=CLAIM, setting=name, ours=ours, share=0.1)
        for name, ours in (
            ("first", PooledDifference(3, -1.0, -2.0, 0.5, 1.0)),
            ("second", PooledDifference(3, -4.0, -8.0, 0.5, 1.0)),
            ("third", None),
        )
    ]
    lists = evidence_markdown(rows, []).split("## ")[1:]
    titles = {part.splitlines()[0]: part for part in lists}
    assert "first" in titles["Refuted at our length of training"]
    assert "second" in titles["Cannot tell"]
    assert "third" in titles["Never run"]
    assert sum(part.count("bits: ") for part in lists) == 3


def test_every_claim_names_a_study_a_metric_and_conditions_that_exist() -> None:
    for claim in CLAIMS:
        study = STUDIES[claim.study]
        assert (claim.condition, claim.baseline) in study.comparisons, claim.title
        assert claim.metric in {metric.key for metric in study.compared}, claim.title


def test_the_sign_of_a_difference_over_training() -> None:
    def run(condition: str, seed: int, *values: float) -> dict[str, Any]:
        curve = [[10 * (step + 1), value] for step, value in enumerate(values)]
        return record(condition, seed, 0.0, curves={"valid": curve})

    group = Group(
        "a",
        "size",
        [run("smoe", 0, 2.0, 2.0), run("smoe", 1, 4.0, 4.0), run("ac", 0, 1.0, 3.0)],
    )
    band = difference_curve(group, "ac", "smoe", "valid")
    assert band is not None
    assert band.steps == [10, 20]
    assert band.means == pytest.approx([-50.0, 50.0])
    assert "n = 1" in band.label
    assert difference_curve(group, "smoe", "missing", "valid") is None
