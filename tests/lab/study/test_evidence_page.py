"""The evidence page, as its command writes it, and as the records of this repository give it."""

import json
import re
from pathlib import Path

import pytest
from evidence_cases import record
from test_study_grids import NOWHERE

from acmoe.cli import main
from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.evidence.page import evidence_markdown, read_all
from acmoe.lab.study.evidence.rows import Row, evidence_rows
from acmoe.lab.study.evidence.runs import runs_markdown
from acmoe.lab.study.evidence.short import answer, headline, long_runs, short_markdown
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size

ROOT = Path(__file__).parents[3]


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
    assert (
        f"| EnWik-8 bits per byte, long runs | enwiki15: {setting} | +0.07% [" in text
    )  # 0, 0.001 and 0.002; 0.001 of 1.51
    assert (
        "**Not known: no comparison has an interval and all pairs declared before its runs.**"
        in text
    )
    assert " Of 0 comparisons at the lengths of training that were run here, 0 exclude" in text
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


def test_every_row_whose_data_are_not_the_papers_names_both(recorded: list[Row]) -> None:
    for row in recorded:
        title = row.claim.title
        ours = {"EnWik-8": "enwiki15", "WikiText-103": "enwiki15", "ImageNet": "Imagenette"}
        assert all(row.claim.data == data for name, data in ours.items() if name in title), title
    lines = [line for line in long_runs(recorded).splitlines() if line.startswith("- ")]
    assert lines and all("(enwiki15: " in line for line in lines)


def test_the_headline_counts_the_settings_of_the_pages_lists() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    lists = {part.splitlines()[0].strip("# "): part for part in re.split(r"\n(?=##)", page)[1:]}

    def settings(title: str) -> int:
        """Count the settings of a list, with semicolons between; a command may come last."""
        found = [part for name, part in lists.items() if name.startswith(title)]
        claims = re.findall(r"^- .*", found[0] if found else "", re.MULTILINE)
        return sum(re.sub("; `.*`", "", line).count(";") + 1 for line in claims)

    refuted, unknown, supported, interim = map(
        settings, ("Refuted", "Cannot tell", "In favour", "Interim")
    )
    sentence = page.split("evidence-headline:begin -->")[1].split("\n\n")[1].split("** ")[1]
    gains = re.findall(r"(\d+) pairs, ([\d.]+%) of the paper's training", sentence)
    assert len(gains) == supported
    for pairs, share in gains:
        assert f"| inside | {pairs} | {share} |" in page
    counted = re.sub(r" \(\d+ pairs, [^)]*\)", "", sentence)
    numbers = [int(number) for number in re.findall(r"\d+", counted)]
    total = refuted + unknown + supported
    losses = page.count(" (a loss)")
    worse, left = [refuted, losses] if losses else [], [interim] if interim else []
    assert numbers == [total, refuted, unknown, supported, *worse, *left]


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
