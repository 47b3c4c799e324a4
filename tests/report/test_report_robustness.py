"""Figures of attacks, contaminations and shifts, found where the commands leave them."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from acmoe.data.text.swaps import SwapReport
from acmoe.evaluate.saved import save_evaluation
from acmoe.report.robustness import robustness
from acmoe.report.runs import RunFacts
from run_facts import run_facts

ATTACK: dict[str, Any] = {
    **{"step": 40, "attack": {"name": "pgd"}, "space": "pixel", "clamp": True, "labels": "true"},
    **{"split": "test", "images": 270, "batch": 64, "statistics": "running", "clean_top1": 90.0},
    "figures": [{"eps": 2 / 255, "top1": 41.5, "top5": 80.0, "moved": [10.0, 20.0]}],
}
EVALUATION: dict[str, Any] = {
    **{"split": "test", "metric": "perplexity", "batch": 8, "block": 256, "step": 100},
    # As `LanguageReport.to_json` writes it: 1 of 40 words is 2.5%; ends of lines are tokens too.
    "contamination": asdict(SwapReport(tokens=50, words=40, nominal=1, replaced=1, changed=1)),
    "figures": [
        {"statistics": "batch", "contaminated": False, "value": 30.0, "tokens": 9},
        {"statistics": "batch", "contaminated": True, "value": 33.0, "tokens": 9},
        {"statistics": "running", "contaminated": False, "value": 31.0, "tokens": 9},
        {"statistics": "running", "contaminated": True, "value": 35.0, "tokens": 9},
    ],
}
SHIFT = {
    **{"shift": "imagenet-o", "metric": "AUPR (%)", "value": 17.5, "chance": 9.0, "images": 2000},
    **{"classes": 200, "statistics": "batch"},
}
DEMO: dict[str, Any] = {
    **{"seed": 0, "steps": 20, "replaced": 0.05, "test_tokens": 1000},
    "rows": [
        {"router": "SMoE", "bits_per_byte": 2.0, "contaminated": 2.5},
        {"router": "ACMoE", "bits_per_byte": 2.1, "contaminated": 2.4},
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> RunFacts:
    folder = tmp_path / "acmoe"
    folder.mkdir()
    return replace(run_facts({20: 2.0}), folder=folder)


def put(path: Path, document: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_an_attack_is_a_row_a_radius(run: RunFacts) -> None:
    put(run.folder / "attacks" / "report-pgd-0.json", ATTACK)
    (figure,) = robustness(run).figures
    assert (figure.what, figure.clean, figure.value) == ("pgd, radius 2/255", 90.0, 41.5)
    assert not figure.lower
    assert "the attack sends 15.0% of tokens to another expert" in figure.details
    assert "expert capacity none" in figure.details


def test_a_capacity_or_averaged_weights_make_it_another_figure(run: RunFacts) -> None:
    put(run.folder / "attacks" / "report-pgd-0.json", {**ATTACK, "capacity": 1.25})
    put(run.folder / "attacks" / "report-pgd-1.json", {**ATTACK, "capacity": None, "ema": True})
    limited, averaged = robustness(run).figures
    assert limited.what == "pgd, radius 2/255, capacity 1.25"
    assert "capacity 1.25 (the paper's)" in limited.details
    assert averaged.what == "pgd, radius 2/255, averaged weights"


def test_other_settings_of_an_attack_make_it_another_figure(run: RunFacts) -> None:
    """A radius of normalised pixels is another length, and fewer steps are a weaker attack."""
    usual = {"name": "pgd", "steps": 20, "step_size": 0.15, "random_start": True}
    paper = {"space": "normalized", "clamp": False, "labels": "predicted", "capacity": 1.25}
    put(run.folder / "attacks" / "report-pgd-0.json", {**ATTACK, "attack": usual})
    put(
        run.folder / "attacks" / "report-pgd-1.json",
        {**ATTACK, "attack": {**usual, "steps": 3}, "split": "valid"},
    )
    put(run.folder / "attacks" / "report-pgd-2.json", {**ATTACK, **paper})
    assert [figure.what for figure in robustness(run).figures] == [
        "pgd, radius 2/255",
        "pgd, radius 2/255, steps 3, valid split",
        "pgd, radius 2/255, normalised pixels, not clamped, predicted labels, capacity 1.25",
    ]


def test_contaminated_text_stands_beside_clean_text_of_the_same_statistics(run: RunFacts) -> None:
    put(run.folder / "evaluation.json", EVALUATION)
    found = robustness(run).figures
    assert [(one.clean, one.value) for one in found] == [(30.0, 33.0), (31.0, 35.0)]
    assert found[0].what == "2.5% of words replaced"
    drawn = {"rate": 0.025, "seed": 3, "early_stop": True, "targets": "corrupted"}
    put(run.folder / "evaluation.json", {**EVALUATION, "contamination_config": drawn})
    assert robustness(run).figures[0].what == "2.5% of words replaced, seed 3"


def test_one_evaluation_in_two_files_is_one_figure(run: RunFacts) -> None:
    save_evaluation(run.folder, EVALUATION)
    put(run.folder / "evaluation.json", EVALUATION)  # as `--json > FILE` writes it
    assert len(list(run.folder.glob("evaluation*.json"))) == 2
    assert len(robustness(run).figures) == 2  # two statistics modes


def test_an_evaluation_of_clean_text_alone_says_nothing_here(run: RunFacts) -> None:
    put(run.folder / "evaluation.json", {**EVALUATION, "contamination": None})
    assert robustness(run).figures == ()


def test_a_shift_has_its_chance_and_no_clean_figure(run: RunFacts) -> None:
    put(run.folder / "shift-o.json", SHIFT)
    (figure,) = robustness(run).figures
    assert (figure.value, figure.chance, figure.clean) == (17.5, 9.0, None)
    put(run.folder / "shift-o.json", {**SHIFT, "step": 40})
    assert robustness(run).figures[0].details.endswith("; checkpoint of step 40")


def test_the_demo_gives_each_of_its_runs_its_own_row(run: RunFacts) -> None:
    put(run.folder.parent / "comparison.json", DEMO)
    (figure,) = robustness(run).figures
    assert (figure.what, figure.clean, figure.value) == ("5.0% of bytes replaced", 2.1, 2.4)


@pytest.mark.parametrize("other", [{"seed": 1}, {"steps": 300}])
def test_the_figures_of_an_earlier_demo_are_not_taken(run: RunFacts, other: dict[str, int]) -> None:
    put(run.folder.parent / "comparison.json", {**DEMO, **other})
    assert robustness(run).figures == ()


def test_nothing_measured_gives_the_command_that_would(run: RunFacts) -> None:
    found = robustness(run)
    assert found.figures == ()
    assert found.command == f"acmoe evaluate {run.folder} --contaminate 0.05"
    assert robustness(replace(run, kind="swin-run")).command.startswith("acmoe attack ")


@pytest.mark.parametrize("document", ["{", "[]", {"figures": 3}, {**ATTACK, "figures": [{}]}])
def test_a_damaged_file_is_a_note_and_not_an_end(run: RunFacts, document: object) -> None:
    put(run.folder / "attacks" / "report-pgd-0.json", document)
    put(run.folder / "shift.json", SHIFT)
    found = robustness(run)
    assert len(found.figures) == 1
    assert len(found.notes) == 1
    assert "report-pgd-0.json" in found.notes[0]
