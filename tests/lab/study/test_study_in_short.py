"""What stands above the tables of a long study, the chosen learning rates, and the page's words."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy import stats
from test_study_grids import NOWHERE

from acmoe.lab.study.grids.long import BYTE_RATES
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.records import read_results
from acmoe.lab.study.results.report import draw
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.results.tables import study_markdown
from acmoe.lab.study.size import Size
from study_cases import record

ROOT = Path(__file__).parents[3]
LONG = STUDIES["long"]
LOW, MIDDLE, HIGH = BYTE_RATES


def line(condition, seed, test, setting=MIDDLE, *, valid=None, tokens=1e9):
    metrics = {"test": test, "tokens_trained": tokens}
    if valid is not None:
        metrics["valid"] = valid
    made = record(condition, seed, test, study="long", setting=setting, metrics=metrics)
    return made | {"digest": f"{setting}-{condition}-{seed}"}


def page_of(lines):
    return study_markdown(summarise(LONG, lines), [])


def test_runs_tokens_and_ranges_are_those_of_the_records():
    plain, adaptive = [2.0, 2.2, 2.1], [2.02, 2.178, 2.1]  # +1, -1 and 0 percent
    lines = [line("smoe", seed, value) for seed, value in enumerate(plain)]
    lines += [line("adaptive-previous", seed, value) for seed, value in enumerate(adaptive)]
    lines[0]["curves"] = {"valid": [[2, 1.9], [4, 2.0]]}  # the validation before the last is best
    page = page_of(lines)
    assert "Runs that are done: 6, 6.0 billion tokens of training together." in page
    assert "is the best of the run in 5 of 6 runs." in page
    # Differences of 0.02, -0.022 and 0 have the mean -0.002 / 3, 0.03 % of 2.1.
    row = f"| {MIDDLE} | smoe (3): 2.0000 to 2.2000, 10.0% | adaptive-previous"
    assert f"{row} | 3 of 4 | -1.00 to +1.00 | -0.03 |" in page
    lines += [line("smoe", 3, 2.1), line("adaptive-previous", 3, 2.1)]
    differences = [100 * value / 2.1 for value in (0.02, -0.022, 0.0, 0.0)]
    low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert f"| 4 | -1.00 to +1.00 | -0.02 [{low:+.2f}, {high:+.2f}] |" in page_of(lines)


def test_pairs_whose_mean_is_exactly_zero_have_an_interval():
    """In percent of 2: +12.5 and -12.5 twice each."""
    lines = [line("smoe", seed, 2.0) for seed in range(4)]
    tests = (2.25, 1.75, 2.25, 1.75)
    lines += [line("adaptive-previous", seed, value) for seed, value in enumerate(tests)]
    low, high = stats.ttest_1samp([12.5, -12.5, 12.5, -12.5], 0).confidence_interval(0.95)
    assert f"| 4 | -12.50 to +12.50 | +0.00 [{low:+.2f}, {high:+.2f}] |" in page_of(lines)


def test_the_rate_is_chosen_on_validation_and_compared_on_test():
    """The plain router validates best at 7e-4, the adaptive one at 1.4e-3; tests say otherwise."""
    lines = []
    for setting, plain, adaptive in ((LOW, 1.6, 1.7), (MIDDLE, 1.4, 1.5), (HIGH, 1.5, 1.3)):
        lines.append(line("smoe", 0, 2.0, setting, valid=plain))
        lines.append(line("adaptive-previous", 0, 2.1, setting, valid=adaptive))
    lines.append(line("smoe", 1, 9.0, valid=0.1))  # no such seed at the other rates: no vote
    page = page_of(lines)
    assert "| smoe | 0 | 1.6000 | 1.4000 | 1.5000 | 0.0007 |" in page
    row = "| adaptive-previous | 0 | 1.7000 | 1.5000 | 1.3000 | 0.0014, at the edge of the range |"
    assert row in page
    assert "| adaptive-previous at 0.0014 | smoe at 0.0007 | 1 of 4 | +5.00 |" in page
    assert f"| {LOW} | smoe (1): 2.0000 | adaptive-previous |" in page  # one seed has no range


def test_the_chosen_rates_are_compared_once_all_declared_pairs_are_there():
    """In percent of 2: +1, +2, +3 and +4 at the rate that both conditions choose."""
    lines = [
        line(name, 0, 2.0, setting, valid=valid)
        for name in ("smoe", "adaptive-previous")
        for setting, valid in ((LOW, 1.6), (MIDDLE, 1.5))
    ]
    for seed, test in enumerate((2.02, 2.04, 2.06, 2.08)):
        lines.append(line("smoe", seed, 2.0, HIGH, valid=1.4))
        lines.append(line("adaptive-previous", seed, test, HIGH, valid=1.4))
    row = "| adaptive-previous at 0.0014 | smoe at 0.0014 |"
    assert f"{row} 3 of 4 | +2.00 |" in page_of(lines[:-2])
    low, high = stats.ttest_1samp([1, 2, 3, 4], 0).confidence_interval(0.95)
    assert f"{row} 4 | +2.50 [{low:+.2f}, {high:+.2f}] |" in page_of(lines)


def test_a_rate_at_which_a_run_diverged_is_not_chosen():
    lines = [line("smoe", 0, 2.0, setting, valid=1.0) for setting in (LOW, MIDDLE)]
    stopped = line("smoe", 0, 2.0, HIGH)
    stopped["metrics"] = {"diverged": 1.0}
    page = page_of([*lines, stopped])
    assert "| smoe | 0 | 1.0000 | 1.0000 | diverged | 0.00035, at the edge of the range |" in page


def test_a_pair_lost_to_divergence_was_run_and_leaves_no_test():
    """The evidence page counts such a pair as run, and gives no verdict on the pairs it left."""
    lines = [line(name, seed, 2.0 + 0.1 * seed) for name in ("smoe", "fade") for seed in range(4)]
    lines[0]["metrics"] = {"diverged": 1.0}
    summary = summarise(LONG, lines)
    (one,) = (one for one in summary.comparisons if one.metric == LONG.compared[0])
    assert (one.difference.n, one.lost, one.interim, one.tested) == (3, 1, False, False)
    assert one.holm_t is None and one.holm_flip is None
    page = page_of(lines)
    assert "| fade | smoe | 3, 1 diverged |" in page and "| fade | 3, 1 diverged |" in page
    assert "fewer than three, or lost pairs to divergence, and no test;" in page
    lines[1]["metrics"] = {}  # an older run that did not measure it: the pair is still to be run
    (one,) = (one for one in summarise(LONG, lines).comparisons if one.metric == LONG.compared[0])
    assert (one.pairs, one.lost, one.interim) == ("2 of 4, 1 diverged", 1, True)


def test_no_rate_is_chosen_before_all_rates_are_run():
    lines = [line("smoe", 0, 2.0, setting, valid=1.0) for setting in (LOW, MIDDLE)]
    assert "chosen for each condition" not in page_of(lines)
    assert "chosen for each condition" not in page_of([*lines, line("fade", 0, 2.0, HIGH)])


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_fewer_than_three_pairs_are_not_tested_even_where_no_more_were_declared(pairs):
    setting = "switch-enwik8, constant"
    assert LONG.declared(setting) == 2
    lines = [line("smoe", seed, 2.0 + seed, setting) for seed in range(pairs)]
    lines += [line("adaptive-previous", seed, 2.1 + 1.1 * seed, setting) for seed in range(pairs)]
    (one,) = [one for one in summarise(LONG, lines).comparisons if one.metric.key == "test"]
    assert (one.interim, one.tested) == (pairs < 2, pairs == 3)
    assert (one.holm_flip is None) == (pairs < 3)


@pytest.mark.parametrize("name, parts", [("long", ("enwik8",)), ("long-words", ())])
def test_the_settings_of_a_choice_of_rates_differ_in_the_rate_alone(name, parts):
    study = STUDIES[name]
    assert [study.declared(setting) for setting in study.rates] == [1, 4, 4]  # 0.0014 was chosen
    cells = study.cells(NOWHERE, Size(), (0,), parts)
    for condition in ("smoe", "adaptive-previous", "adaptive-current"):
        runs = [
            cell.config
            for setting in study.rates
            for cell in cells
            if (cell.setting, cell.condition) == (setting, condition)
        ]
        assert [run.lr for run in runs] == list(study.rates.values()) == [3.5e-4, 7e-4, 1.4e-3]
        assert [10 * run.min_lr for run in runs] == pytest.approx([run.lr for run in runs])
        first, second, third = (replace(run, lr=1.0, min_lr=0.1) for run in runs)
        assert first == second == third


# The table above "What has been run" is written by hand.
WHERE = {
    **{name: f"switch-enwik8, {name}" for name in ("balance 0.01", "balance 0", "rate 0.0014")},
    "Switch-small, 7e-4": "switch-small, dropout 0.1",
    "Switch-small, 0.0014": "switch-small, rate 0.0014",
    "GLaM-small, 7e-4": "glam-small",
}


@pytest.mark.parametrize("name", ["long", "long-words"])
def test_the_first_table_of_a_page_has_every_tested_comparison_of_the_records(name):
    first = (ROOT / "studies" / f"{name}.md").read_text().split("\n\n")[2]
    shown = {tuple(line.strip("| ").split(" | ")) for line in first.splitlines()[2:]}
    records = read_results(ROOT / "studies" / "records" / f"{name}.jsonl")
    summary = summarise(STUDIES[name], records)
    found = set()
    for group in summary.groups:
        for one in summary.in_group(group):
            if one.metric.key != "test" or not one.tested:
                continue
            ours, plain = (group.by_seed(key, "test") for key in (one.condition, one.baseline))
            single = ", ".join(f"{100 * (ours[s] / plain[s] - 1):+.2f}" for s in range(4))
            whole, difference = fmean(plain.values()) / 100, one.difference
            low, high = difference.low / whole, difference.high / whole
            p = [difference.p_t, *([one.holm_t] if name == "long" else [])]
            found.add(
                (
                    f"`{one.condition}`" + ", an idea of our own" * (one.condition == "fade"),
                    next(key for key, setting in WHERE.items() if setting == group.setting),
                    f"{one.relative:+.2f} [{low:+.2f}, {high:+.2f}]",
                    single,
                    *(f"{value:.3f}" if value < 0.1 else f"{value:.2f}" for value in p),
                )
            )
    assert shown == found


# The words about `fade` on the page of `long` are final and written by hand.


def figures(condition):
    path = ROOT / "studies" / "records" / "long.jsonl"
    records = [json.loads(text) for text in path.read_text().splitlines()]
    return {
        one["seed"]: one
        for one in records
        if one["setting"] == MIDDLE and one["condition"] == condition
    }


def test_the_verdict_on_fade_is_that_of_its_records():
    page = (ROOT / "studies" / "long.md").read_text()
    words = re.sub(r"\s+", " ", page.split("### The verdict on `fade`")[1].split("\n###")[0])
    fade, plain, adaptive = (
        {seed: run["metrics"]["test"] for seed, run in figures(name).items()}
        for name in ("fade", "smoe", "adaptive-previous")
    )
    assert sorted(fade) == sorted(plain) == sorted(adaptive) == [0, 1, 2, 3]
    mean = fmean(plain.values())
    differences = [100 * (fade[seed] - plain[seed]) / mean for seed in range(4)]
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    assert f"{fmean(differences):+.2f}% [{low:+.2f}, {high:+.2f}], p = {test.pvalue:.2f}" in words
    single = [100 * (fade[seed] / plain[seed] - 1) for seed in range(4)]
    first, second, third, fourth = (f"{value:+.2f}" for value in single)
    assert f"({first}, {second}, {third} and {fourth}%)" in words
    assert f"differ by {third} and {fourth}%" in words
    assert sum(value > 0 for value in single) == 3
    seen = float(re.findall(r"([\d.]+)% is the smallest", words)[0])
    errors = seen / (stdev(differences) / math.sqrt(4))
    assert stats.nct.sf(stats.t.ppf(0.975, 3), 3, errors) == pytest.approx(0.8, abs=0.002)
    means = f"{fmean(fade.values()):.4f} against {fmean(adaptive.values()):.4f}"
    assert means in words


def test_the_curves_of_fade_are_told_as_they_are():
    page = (ROOT / "studies" / "long.md").read_text()
    words = re.sub(r"\s+", " ", page.split("### The verdict on `fade`")[1].split("\n###")[0])
    fade, plain = figures("fade"), figures("smoe")
    falls, rises = [], []
    for seed in range(4):
        ours, theirs = (dict(runs[seed]["curves"]["valid"]) for runs in (fade, plain))
        middle, last = (100 * (ours[step] / theirs[step] - 1) for step in (5000, 10000))
        (rises if last > middle else falls).append(f"{middle:.2f} to {last:.2f}%")
    assert f"in two pairs ({', '.join(falls)}) and rises in two ({', '.join(rises)})" in words


def test_a_comparison_without_a_test_has_an_open_circle(tmp_path):
    """Labels are comments in the drawing: three of four declared pairs have no test."""
    for seeds, opened in ((3, True), (4, False)):
        lines = [
            line(condition, seed, value + 0.01 * seed * (condition == "smoe"))
            for condition, value in (("smoe", 2.0), ("adaptive-previous", 2.1))
            for seed in range(seeds)
        ]
        draw(summarise(LONG, lines), tmp_path)
        drawing = (tmp_path / "long-differences.svg").read_text()
        assert ("<!-- adaptive-previous - smoe (n = 3 of 4) -->" in drawing) == opened
        assert ("<!-- open circles: too few pairs for a test -->" in drawing) == opened
        assert ("fill: #ffffff; stroke: #0072b2" in drawing) == opened
