"""The records of starts and scores in a run's folder."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import acmoe
from acmoe.cli import main
from acmoe.evaluate.environment import code_commit, command_line
from acmoe.evaluate.saved import save_evaluation
from acmoe.evaluate.starts import STARTS, read_starts, record_start
from acmoe.report.runs import read_run
from acmoe.report.scores import chosen_score, read_scores
from tiny_runs import byte_corpus, tiny_run, trained

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {
    **{"corpus": "Lines", "split": "test", "metric": "bits per byte", "batch": 8, "block": 16},
    **{"precision": "fp32", "step": 20, "contamination": None},
    "figures": [{"statistics": "running", "contaminated": False, "value": 2.5, "tokens": 640}],
}


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/venv/bin/acmoe", "train", "a b"], "acmoe train 'a b'"),
        (["/src/acmoe/__main__.py", "train", "demo"], "acmoe train demo"),
        (["tools/mine.py", "--steps", "3"], "python tools/mine.py --steps 3"),
        ([""], "python (interactive)"),
        (["-c"], "python -c ..."),
    ],
)
def test_a_command_can_be_given_to_a_shell_again(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == command


def test_the_commit_of_a_copy_without_history_is_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACMOE_COMMIT", "0123abc")
    assert code_commit() == "0123abc"


def test_every_start_of_a_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACMOE_COMMIT", "0123abc")
    folder, corpus = tmp_path / "run", byte_corpus(tmp_path)
    config = tiny_run(corpus, "steps=2", "checkpoint_every=1", "keep=2")
    monkeypatch.setattr(sys, "argv", ["acmoe", "train", "first"])
    trained(config, folder)
    step = folder / "checkpoints" / "step-00000002"
    step.rename(tmp_path / "gone")
    monkeypatch.setattr(sys, "argv", ["acmoe", "train", "second"])
    trained(config, folder)
    trained(config, folder)  # nothing is left to do, so that this is no start
    starts, notes = read_starts(folder)
    assert notes == []
    assert [(one.command, one.step) for one in starts] == [
        ("acmoe train first", 0),
        ("acmoe train second", 1),
    ]
    assert starts[0].commit == "0123abc"
    assert (starts[0].acmoe, starts[0].torch) == (acmoe.__version__, str(torch.__version__))
    assert (starts[0].device, starts[0].processes) == ("cpu", 1)
    assert starts[0].time.endswith("+00:00")
    assert read_run(folder, "run").starts == starts


def test_a_folder_without_starts_has_none_and_a_torn_line_costs_itself(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == ((), [])
    record_start(tmp_path, CPU, step=0)
    path = tmp_path / STARTS
    path.write_bytes(path.read_bytes()[:-9])  # a crash while writing
    record_start(tmp_path, CPU, step=5)
    starts, notes = read_starts(tmp_path)
    assert [start.step for start in starts] == [5]
    assert notes == [f"{path}: records left out: 1 damaged (line 1)"]
    path.write_bytes(b"")
    assert [note.startswith(f"{path} is empty") for note in read_starts(tmp_path)[1]] == [True]


@pytest.mark.parametrize(("field", "value"), [("step", True), ("command", None), ("python", 3)])
def test_a_line_of_another_kind_is_no_start(tmp_path: Path, field: str, value: object) -> None:
    record_start(tmp_path, CPU, step=0)
    path = tmp_path / STARTS
    record = json.loads(path.read_text())
    del record["crc32"]
    path.write_text(json.dumps({**record, field: value}) + "\n")
    assert read_starts(tmp_path) == ((), [f"{path}: 1 lines are no starts of a run; left out"])


def test_the_same_evaluation_replaces_its_file_and_another_has_its_own(tmp_path: Path) -> None:
    first = save_evaluation(tmp_path, TEXT)
    better = {**TEXT, "figures": [{**TEXT["figures"][0], "value": 2.0}]}
    assert save_evaluation(tmp_path, better) == first
    assert save_evaluation(tmp_path, {**TEXT, "batch": 4}) != first
    assert save_evaluation(tmp_path, {**TEXT, "split": "valid"}).name.startswith("evaluation-valid")
    scores, notes = read_scores(tmp_path)
    assert notes == []
    assert sorted(score.value for score in scores) == [2.0, 2.5]  # validation is no test
    assert all(score.label == "test bits per byte" and score.lower for score in scores)


def test_images_sentences_and_damaged_files_are_read(tmp_path: Path) -> None:
    image = {
        **{"step": 3, "data": "digits", "split": "test", "images": 270, "size": 8, "batch": 64},
        **{"precision": "fp32", "capacity": None, "ema": True},
        "figures": [{"statistics": "none", "top1": 91.5, "top5": 99.0, "loss": 0.3}],
    }
    tuned = {
        **{"split": "test", "step": 2, "test_accuracy": 80.0, "sentences": {"test": 12}},
        "splits": "all as published",
    }
    save_evaluation(tmp_path, image)
    save_evaluation(tmp_path, tuned)
    (tmp_path / "evaluation-x.json").write_text('{"split": "test", "step": "last"}')
    (tmp_path / "evaluation-y.json").write_text("{")
    scores, notes = read_scores(tmp_path)
    assert {(score.label, score.value, score.step) for score in scores} == {
        ("test top-1 (%)", 91.5, 3),
        ("test accuracy (%)", 80.0, 2),
    }
    assert any("averaged weights" in score.protocol for score in scores)
    assert [note.partition(" is ")[0].rpartition("/")[2] for note in notes] == [
        "evaluation-x.json",
        "evaluation-y.json",
    ]


def test_the_summary_has_the_score_of_the_best_checkpoint_or_of_the_latest(tmp_path: Path) -> None:
    for step in (5, 20, 10):
        save_evaluation(tmp_path, {**TEXT, "step": step})
    scores, _ = read_scores(tmp_path)
    at_best, latest = chosen_score(scores, 10), chosen_score(scores, 7)
    assert at_best is not None and at_best.step == 10
    assert latest is not None and latest.step == 20
    assert chosen_score((), 10) is None


def test_evaluate_leaves_its_score_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tiny_run(byte_corpus(tmp_path, lines=60), "steps=2"), tmp_path / "run")
    command = ["evaluate", str(run), "--device", "cpu", "--threads", "1"]
    with pytest.raises(SystemExit):
        main([*command, "--json"])
    printed = json.loads(capsys.readouterr().out)
    (score,) = read_run(run, "run").tested
    assert (score.value, score.step) == (printed["figures"][0]["value"], 2)
    (run / score.source).unlink()

    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)  # as in `acmoe evaluate RUN | head -1`
        with pytest.raises(SystemExit):
            main(command)
    (again,) = read_run(run, "run").tested
    assert again.value == score.value

    def full(path: Path, text: str) -> None:
        raise acmoe.UserError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("acmoe.storage.sealed.replace_text", full)
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0
    shown = capsys.readouterr()
    assert "bits per byte" in shown.out
    assert "`acmoe report` will not show this score: cannot write" in shown.err
