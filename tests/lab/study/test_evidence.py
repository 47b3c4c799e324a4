"""The evidence page: pooled intervals by hand, verdicts, and the page from records."""

import json
import math
import re
from pathlib import Path
from statistics import variance
from typing import Any

import pytest
from scipy import stats
from test_study_grids import NOWHERE

from acmoe.cli import main
from acmoe.errors import UserError
from acmoe.lab.study.evidence.claims import CLAIMS, Claim
from acmoe.lab.study.evidence.page import evidence_markdown, read_all
from acmoe.lab.study.evidence.rows import Row, differences, evidence_rows
from acmoe.lab.study.evidence.runs import runs_markdown
from acmoe.lab.study.evidence.short import answer, headline, long_runs, short_markdown
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.difference_curves import difference_curve
from acmoe.lab.study.results.pooled import (
    PooledDifference,
    detectable_errors,
    pooled_differences,
)
from acmoe.lab.study.results.summary import Group
from acmoe.lab.study.size import Size

ROOT = Path(__file__).parents[3]
CLAIM = Claim(
    title="bits",
    study="long",
    metric="test",
    settings=("a", "b"),
    plain=2.0,
    adaptive=1.9,  # -5 %
    unit="percent",
    length=1_000_000,
)


def record(condition: str, seed: int, test: float, **changes: Any) -> dict[str, Any]:
    made = {
        "digest": f"{condition}{seed}{changes.get('setting')}",
        "status": "done",
        "setting": "a",
        "size": "1,000 steps of 100 tokens",
        "condition": condition,
        "seed": seed,
        "metrics": {"test": test},
    }
    return made | changes


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


def status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stop:
        main(["study", *arguments])
    return stop.value.code


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "studies" / "records"
    folder.mkdir(parents=True)
    setting = "switch-enwik8, balance 0.01"
    lines = [
        record(name, seed, 1.5 + (0.01 + shift) * seed, setting=setting)
        for name, shift in (("smoe", 0.0), ("adaptive-previous", 0.001))
        for seed in range(3)
    ]
    (folder / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "evidence.md"
    names = ("evidence-headline", "evidence", "evidence-short")
    parts = [f"<!-- study:{name}:begin -->\n<!-- study:{name}:end -->\n" for name in names]
    page.write_text("words\n" + "".join(parts))
    assert status("--evidence", str(page), "--pictures", str(tmp_path / "figures")) == 0
    text = page.read_text()
    assert text.startswith("words\n")
    assert f"| {setting} | +0.07% [" in text  # 0, 0.001 and 0.002; 0.001 of 1.51
    assert (
        "**Not known: no comparison has an interval and all pairs declared before its runs.**"
        in text
    )
    assert " At the lengths of training that were run here, 0 of 0 comparisons exclude" in text
    assert "1 more has fewer pairs than declared, and no verdict yet.\n" in text
    assert "| bytes, long runs, balance 0.01, bits per byte | +0.07% [" in text
    assert "| words, short runs, Switch-small, perplexity | no figures | -3.26% | 0 |  |" in text
    assert (tmp_path / "figures" / "evidence.svg").is_file()
    assert status("long", "--evidence", str(page)) == 2
    assert "leave 'long' out" in capsys.readouterr().err
    page.write_text("words\n")
    assert status("--evidence", str(page)) == 2
    assert "has none of the markers" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded() -> list[Row]:
    return evidence_rows(CLAIMS, read_all(ROOT / "studies" / "records"))


def test_a_row_that_compares_another_model_than_the_paper_s_names_both(
    recorded: list[Row],
) -> None:
    """The paper finetuned its medium models; ours are small."""
    table = evidence_markdown(recorded, [])
    for task in ("SST-2", "SST-5", "Banking-77"):
        title = f"{task} accuracy after finetuning, Switch-medium in the paper"
        assert f"| {title} | switch-small, dropout 0.1 |" in table


def test_the_page_and_the_readme_are_those_of_the_records(recorded: list[Row]) -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert f"**{answer(recorded)}** {headline(recorded)}\n\n{long_runs(recorded)}" in page, (
        "run acmoe study --evidence docs/evidence.md"
    )
    assert evidence_markdown(recorded, ["studies/figures/evidence.svg"]) in page
    assert short_markdown(recorded) in readme, "run acmoe study --evidence README.md"
    section = readme.split("## Does it help?")[1].split("\n## ")[0]
    intervals = re.findall(r"\[[+-][\d.]+, [+-][\d.]+\]", section)
    assert len(intervals) == 3
    studies = (ROOT / "studies" / "results.md").read_text()
    table = runs_markdown(ROOT / "studies" / "records")
    assert table in studies, "run acmoe study --evidence studies/results.md"
    assert all(interval in page for interval in intervals)


def test_the_headline_counts_the_lines_of_the_pages_lists() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    lists = {part.splitlines()[0].strip("# "): part for part in re.split(r"\n(?=##)", page)[1:]}

    def lines(title: str) -> int:
        found = [part for name, part in lists.items() if name.startswith(title)]
        claims = re.findall(r"^- (?!our own idea)", found[0] if found else "", re.MULTILINE)
        return len(claims)

    refuted, unknown, supported, interim = map(
        lines, ("Refuted", "Cannot tell", "In favour", "Interim")
    )
    sentence = page.split("evidence-headline:begin -->")[1].split("\n\n")[1].split("** ")[1]
    numbers = [int(number) for number in re.findall(r"\d+", sentence)]
    total = refuted + unknown + supported
    smaller = page.count(", which the interval excludes as too large\n")
    losses = page.count("; the interval also excludes zero, on the side of a loss\n")
    worse, less, left = ([number] if number else [] for number in (losses, smaller, interim))
    assert numbers == [refuted, total, *worse, unknown, supported, *less, *left]


def test_every_attacked_model_has_a_row_for_each_attack() -> None:
    """The paper has figures of all three models under all three attacks (Table 4 and appendix)."""
    claims = [claim for claim in CLAIMS if claim.study == "vision"]
    settings = {setting for claim in claims for setting in claim.settings}
    for metric in ("pgd-paper 1/255", "fgsm-paper 1/255", "spsa-paper 1"):
        found = [claim for claim in claims if claim.metric == metric]
        assert {setting for claim in found for setting in claim.settings} == settings
    (soft,) = [one for one in claims if one.title == "PGD 1/255, SoftMoE"]
    assert soft.effect == pytest.approx(2.96)  # 48.25 - 45.29
    assert soft.settings == ("softmoe",)


def test_every_declared_comparison_of_long_runs_has_a_row() -> None:
    rows = {
        (claim.study, claim.condition, claim.baseline, setting): claim.declared
        for claim in CLAIMS
        for setting in claim.settings
    }
    for name in ("long", "long-words"):
        study = STUDIES[name]
        cells = study.cells(NOWHERE, Size(), (0,), ("enwik8",) if name == "long" else ())
        found = {(cell.setting, cell.condition) for cell in cells}
        declared = {
            (name, condition, baseline, setting)
            for setting, condition in found
            for other, baseline in study.comparisons
            if other == condition and (setting, baseline) in found
        }
        assert declared == {key for key in rows if key[0] == name}
        assert all(rows[key] == study.declared(key[3]) for key in declared)
        assert study.seeds == study.declared_pairs == 4
        for setting, number in study.declared_in.items():
            assert number == (1 if ", rate " in setting else 2)
