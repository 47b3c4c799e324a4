"""Verdicts of the evidence page: declared pairs, the rule of `fade`, few pairs, divergence."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from evidence_cases import CLAIM, record
from scipy import stats

from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.evidence.page import evidence_markdown
from acmoe.lab.study.evidence.rows import Row, evidence_rows
from acmoe.lab.study.evidence.short import headline, long_runs, short_markdown
from acmoe.lab.study.results.pooled import PooledDifference


def pairs(
    differences: list[float], setting: str = "a", condition: str = "adaptive-previous"
) -> list[dict[str, Any]]:
    """Records whose differences from a plain run at 2.0 are these, in percent."""
    found = []
    for seed, difference in enumerate(differences):
        found.append(record("smoe", seed, 2.0, setting=setting))
        found.append(record(condition, seed, 2.0 + difference / 50, setting=setting))
    return found


def test_fewer_pairs_than_declared_have_no_verdict_whatever_the_interval() -> None:
    claim = replace(CLAIM, declared=4)
    # Within 0.1 % of zero: an interval that excludes the paper's -5 %.
    for values, verdict, n in (
        ([0.1, 0.0, -0.1], "interim", "3 of 4"),
        ([0.1, 0.0, -0.1, 0.0], "refuted", "4"),
        ([0.1, 0.0, -0.1, 0.0, 0.1], "refuted", "5"),
    ):
        row, other = evidence_rows([claim], {"long": pairs(values)})
        assert (row.inside, row.verdict, other.verdict) == (False, verdict, "never run")
        text = evidence_markdown([row], [])
        assert f"| {n} | 10.0% |" in text
        refuted, rest = text.split("## Cannot tell")
        assert ("bits: a" in refuted) == (verdict == "refuted")
        listed = f"- bits: a ({n} pairs); `acmoe study" in rest.split("### Interim")[-1]
        assert listed == ("outside; pairs are missing" in text) == (verdict == "interim")
        assert ("1 more has fewer pairs" in headline([row])) == (verdict == "interim")


def test_the_rule_of_fade_is_its_paired_t_test_of_four_pairs() -> None:
    """Its interval comes from its own pairs: it excludes zero where p < 0.05."""
    primary, secondary = (claim for claim in CLAIMS if claim.condition == "fade")
    narrow, wide = [-0.5, -0.6, -0.4, -0.5], [9.0, -9.0, 3.0, -9.0]
    setting, other = primary.settings[0], secondary.settings[0]
    for n, verdict in ((2, "interim"), (3, "interim"), (4, "supported")):
        records = pairs(narrow[:n], setting, "fade") + pairs(wide[:n], other, "fade")
        row, beside = evidence_rows([primary, secondary], {"long": records})
        assert row.verdict == verdict
        assert row.ours is not None
        if n > 2:
            low, high = stats.ttest_1samp(narrow[:n], 0).confidence_interval(0.95)
            assert (row.ours.low, row.ours.high) == pytest.approx((low, high))
        else:
            assert row.ours.low is None
        assert beside.verdict == ("secondary" if n == 4 else "interim")
    ideas = evidence_markdown([row, beside], []).split("## Ideas of our own")[1]
    assert ideas.count("[declared before its runs](studies/long.md#declared-before-") == 2
    assert "**helps**" in ideas and "**not decisive**, declared as secondary." in ideas
    records = pairs([-0.5, -0.9, 0.4, -0.5], setting, "fade")
    assert stats.ttest_1samp([-0.5, -0.9, 0.4, -0.5], 0).pvalue > 0.05
    assert evidence_rows([primary], {"long": records})[0].verdict == "undecided"


@pytest.mark.parametrize(
    "low, high, verdict",
    [(-2.0, -1.0, "supported"), (-2.0, 1.0, "undecided"), (0.5, 1.0, "refuted")],
)
def test_an_idea_of_our_own_is_held_against_zero(low: float, high: float, verdict: str) -> None:
    ours = PooledDifference(4, 0.0, low, high, 1.0)
    own = replace(CLAIM, title="own", plain=None, adaptive=None)
    row = Row(claim=own, setting="a", ours=ours, share=0.1)
    assert (row.verdict, row.inside) == (verdict, None)
    signs = PooledDifference(4, 0.0, -high, -low, 1.0)  # accuracies: above zero is better
    assert Row(claim=replace(own, unit="points"), setting="a", ours=signs, share=0.1).verdict == (
        verdict
    )
    text = evidence_markdown([row], [])
    assert f"| own | a | +0.00% [{low:+.2f}, {high:+.2f}] | none |  | 4 |" in text
    lists, ideas = text.split("## Ideas of our own")
    assert "own: a" not in lists
    said = {"supported": "helps", "undecided": "no difference shown", "refuted": "hurts"}[verdict]
    assert f"- own (`adaptive-previous`), a: **{said}**, the interval " in ideas
    assert f". +0.00% [{low:+.2f}, {high:+.2f}] (n = 4).\n" in ideas
    assert ("did not beat the plain router" in ideas) == (verdict == "undecided")


def test_one_pair_takes_its_interval_from_other_settings_or_has_none() -> None:
    records = pairs([1.0], "a") + pairs([0.0, 1.0, 2.0], "b")
    one, three = evidence_rows([CLAIM], {"long": records})
    assert one.ours is not None and three.ours is not None
    reach = stats.t.ppf(0.975, 2) * 1.0  # the standard deviation of b is 1, 2 degrees of freedom
    assert one.ours.low == pytest.approx(1.0 - reach)
    assert three.ours.low == pytest.approx(1.0 - reach / math.sqrt(3))
    (alone,) = evidence_rows(
        [replace(CLAIM, settings=("a",), own_spread=True)], {"long": pairs([1.0])}
    )
    assert alone.verdict == "unknown"
    assert "| +1.00%, one pair, no interval | -5.00% | no interval | 1 |" in (
        evidence_markdown([alone], [])
    )
    one, three = evidence_rows([replace(CLAIM, own_spread=True)], {"long": records})
    assert one.ours is not None and one.ours.low is None  # setting b lends a no spread
    assert three.ours is not None
    assert three.ours.low == pytest.approx(1.0 - reach / math.sqrt(3))


def test_pairs_of_two_commits_and_runs_that_diverged_are_named() -> None:
    claim = replace(CLAIM, settings=("a",), declared=4)
    records = pairs([0.0, 0.1, 0.2])
    for line, commit in zip(records, ("x", "x", "x", "y", "y", "x"), strict=True):
        line["environment"] = {"commit": commit}
    records[4] = {**records[4], "metrics": {"diverged": 1.0}}  # plain, seed 2
    (row,) = evidence_rows([claim], {"long": records})
    assert (row.pairs, row.crossing, row.diverged) == (2, 2, (0, 1))
    text = evidence_markdown([row], [])
    assert "different commits: adaptive-previous in a (2)." in text
    assert "- bits: a (2 of 4 pairs, runs that diverged: 0 adaptive-previous, 1 smoe); `" in text
    (stopped,) = evidence_rows([claim], {"long": records[4:]})
    assert (stopped.pairs, stopped.verdict) == (0, "interim")
    assert "- bits: a (0 of 4 pairs, runs that diverged: 0 ad" in evidence_markdown([stopped], [])


def test_an_unfinished_setting_changes_no_finished_row() -> None:
    claim = replace(CLAIM, declared=4)
    finished = [0.1, 0.0, -0.1, 0.3]
    for wild in ([], [9.0], [9.0, -9.0, 5.0]):
        row, other = evidence_rows([claim], {"long": pairs(finished, "a") + pairs(wild, "b")})
        low, high = stats.ttest_1samp(finished, 0).confidence_interval(0.95)
        assert row.ours is not None
        assert (row.ours.low, row.ours.high) == pytest.approx((low, high))
        assert other.verdict == ("interim" if wild else "never run")
    both = pairs(finished, "a") + pairs([9.0, -9.0, 5.0, 0.0], "b")
    row, other = evidence_rows([claim], {"long": both})
    assert row.ours is not None and row.ours.low is not None and row.ours.low < low


def test_a_row_that_pooling_decides_is_named() -> None:
    """Alone, a's three pairs exclude zero on neither side; b is so even that both together do."""
    gain = [-3.0, -5.0, -10.0]
    even = [0.0, 0.1, -0.1, 0.0, 0.1, -0.1, 0.0, 0.1]
    row, other = evidence_rows([CLAIM], {"long": pairs(gain, "a") + pairs(even, "b")})
    assert stats.ttest_1samp(gain, 0).pvalue > 0.05
    assert (row.verdict, row.verdict_alone) == ("supported", "undecided")
    text = evidence_markdown([row, other], [])
    low, high = stats.ttest_1samp(gain, 0).confidence_interval(0.95)
    assert f'another list: bits, a: [{low:+.2f}, {high:+.2f}], "Cannot tell".' in text
    assert "no row changes lists" in evidence_markdown([other], [])


def test_runs_of_a_changed_working_tree_are_counted() -> None:
    records = pairs([0.0, 0.1, 0.2])
    for line in records:
        line["environment"] = {"commit": "abc"}
    records[1]["environment"] = {"commit": "abc-dirty"}
    row = evidence_rows([CLAIM], {"long": records})[0]
    assert (row.changed, row.crossing) == (1, 1)
    assert "adaptive-previous in a (1 of 6 runs)." in evidence_markdown([row], [])


def test_a_pair_that_diverged_was_run_and_leaves_no_verdict() -> None:
    """The pairs that are left were selected by the outcome, however narrow their interval is."""
    claim = replace(CLAIM, settings=("a",), declared=4)
    records = pairs([0.1, 0.0, -0.1, 0.0])
    assert evidence_rows([claim], {"long": records})[0].verdict == "refuted"
    records[0] = {**records[0], "metrics": {"diverged": 1.0}}  # plain, seed 0
    (row,) = evidence_rows([claim], {"long": records})
    assert (row.pairs, row.ran, row.interim, row.verdict) == (3, 4, False, "unknown")
    assert row.verdict_alone == "unknown"
    text = evidence_markdown([row], []).split("## Cannot tell")[1]
    assert "- bits: a (n = 3, runs that diverged: 0 adaptive-previous, 1 smoe)" in text
    records[0] = {**records[0], "metrics": {}}  # a run that was not asked for this figure
    (row,) = evidence_rows([claim], {"long": records})
    assert (row.pairs, row.ran, row.verdict) == (3, 3, "interim")


def test_a_gain_below_the_papers_is_called_smaller() -> None:
    """Both exclude zero; the paper's -5 % lies in the second interval alone."""
    for values, smaller in (([-1.0, -1.1, -0.9], True), ([-4.0, -5.0, -6.0], False)):
        (row,) = evidence_rows([replace(CLAIM, settings=("a",))], {"long": pairs(values)})
        assert (row.verdict, row.below_paper, row.inside) == ("supported", smaller, not smaller)
        text = evidence_markdown([row], []).split("## In favour")[1].split("\n## ")[0]
        assert ("- bits: a (less than the paper's gain)\n" in text) == smaller
        assert (", a smaller gain than the paper's)" in headline([row])) == smaller
        assert "on the side of a gain (3 pairs, " in headline([row])


def test_a_row_that_cannot_tell_says_how_many_pairs_would() -> None:
    """With a detectable 15 % of 4 pairs, the paper's 5 % need 9 times as many: 36."""
    ours = PooledDifference(4, -1.0, -12.0, 10.0, 15.0)
    row = Row(claim=CLAIM, setting="a", ours=ours, share=0.1)
    enough = replace(row, setting="b", ours=PooledDifference(4, -4.0, -8.0, 0.1, 4.5))
    assert row.verdict == enough.verdict == "undecided"
    text = evidence_markdown([row, enough], []).split("## Cannot tell")[1].split("\n## ")[0]
    assert "\n- bits: a (needs 36 pairs); b\n" in text + "\n"


def test_a_loss_is_told_from_a_gain_that_is_too_small() -> None:
    """Both exclude the paper's -5 %; only the first excludes zero."""
    for values, loss in (([1.0, 1.1, 0.9], True), ([-0.1, 0.0, 0.1], False)):
        (row,) = evidence_rows([replace(CLAIM, settings=("a",))], {"long": pairs(values)})
        assert (row.verdict, row.is_loss) == ("refuted", loss)
        text = evidence_markdown([row], []).split("## Refuted")[1].split("\n## ")[0]
        assert f"- bits: a{' (a loss)' if loss else ''}\n" in text
        assert ("Of the 1, 1 also excludes zero, on the side of a loss." in headline([row])) == loss
        assert ("paper's -5.00%, and zero, on the side of a loss." in long_runs([row])) == loss
    points = replace(CLAIM, settings=("a",), plain=70.0, adaptive=72.0, unit="points")
    (row,) = evidence_rows([points], {"long": pairs([-1.0, -1.1, -0.9])})
    assert (row.verdict, row.is_loss) == ("refuted", True)


def test_the_readme_shows_long_runs_of_words_once_all_declared_pairs_are_there() -> None:
    setting, size = "switch-small, dropout 0.1", "5,000 steps of 24,576 tokens"
    short = pairs([1.0, 1.1, 1.2], setting)
    for n, expected in (
        (3, "| words, short runs, Switch-small, perplexity | +1.10% ["),
        (4, "| words, long runs, Switch-small, perplexity | +0.50% ["),
    ):
        long = [line | {"size": size} for line in pairs([0.3, 0.7, 0.5, 0.5][:n], setting)]
        text = short_markdown(evidence_rows(CLAIMS, {"words": short, "long-words": long}))
        assert expected in text
        assert text.count("| words, ") == 1
        assert ("| -3.26% | 4 | 12.5%, 123 million tokens |" in text) == (n == 4)


def test_two_declared_pairs_end_in_cannot_tell() -> None:
    """The published model: a mean of two pairs, and by its declaration no interval."""
    (claim,) = (claim for claim in CLAIMS if claim.condition == "published")
    (setting,) = claim.settings
    records = []
    for line in pairs([-1.4, -1.3], setting, "published"):
        plain = {"condition": "published-control"} if line["condition"] == "smoe" else {}
        records.append(line | plain)
    (row,) = evidence_rows([claim], {"long": records})
    assert (row.pairs, row.interim, row.verdict) == (2, False, "unknown")
    text = evidence_markdown([row], [])
    assert "| -1.35%, two pairs (-1.40, -1.30), no interval | -1.39% | no interval | 2 |" in text
    assert "published" in text.split("## Cannot tell")[1].split("\n## ")[0]


def test_long_runs_have_one_line_for_each_claim() -> None:
    """Runs of 20% and of 5% of the paper's training have lines, those of less have none."""
    sizes = {"a": 200, "b": 50, "c": 49}  # tokens a step, of 1,000 steps and the paper's million
    records = [
        line | {"size": f"1,000 steps of {tokens} tokens"}
        for setting, tokens in sizes.items()
        for line in pairs([0.2, 0.0, 0.0, 0.2], setting)
    ]
    claims = [replace(CLAIM, settings=(setting,), declared=4) for setting in sizes]
    text = long_runs(evidence_rows(claims, {"long": records}))
    assert text.startswith("The lines below have the runs with at least 5% of the paper's")
    first, second = re.findall("^- .*$", text, re.MULTILINE)
    assert first.startswith("- bits (a, 20.0%): +0.10% [")
    assert second.startswith("- bits (b, 5.0%): +0.10% [")
    assert first.endswith("]; the interval of 4 pairs excludes the paper's -5.00%.")
    three = [line for line in records if line["setting"] == "a"][:-2]
    text = long_runs(evidence_rows(claims[:1], {"long": three}))
    assert "; no verdict yet, 3 of 4 declared pairs (the paper -5.00%)." in text
    assert long_runs(evidence_rows(claims, {})) == ""


def test_two_pairs_are_shown_as_shares_of_their_own_plain_runs() -> None:
    """1.1 and 2.0 against 1.0 and 2.0: +10 and 0 percent, on average 0.1 of 3."""
    figures = (("smoe", 0, 1.0), ("a-router", 0, 1.1), ("smoe", 1, 2.0), ("a-router", 1, 2.0))
    records = [record(name, seed, value, setting="a") for name, seed, value in figures]
    claim = replace(CLAIM, settings=("a",), condition="a-router")
    (row,) = evidence_rows([claim], {"long": records})
    assert "| +3.33%, two pairs (+10.00, +0.00), no interval |" in evidence_markdown([row], [])
