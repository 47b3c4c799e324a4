"""The folder of `acmoe finetune` is told apart from the folder of a run."""

from pathlib import Path

import pytest

from command import acmoe
from tiny_runs import byte_corpus, tiny_run, trained


def test_a_finetuning_is_named_where_a_run_is_needed_and_a_run_where_a_finetuning_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(tiny_run(byte_corpus(tmp_path), "steps=2"), tmp_path / "run")
    Path("task").mkdir()
    for split in ("train", "dev", "test"):
        Path("task", f"{split}.tsv").write_text("sentence\tlabel\nline 1\t0\nline 2\t1\n")
    task = ("--task", "sst2", "--data", "task", "--epochs", 1, "--device", "cpu")
    assert acmoe("finetune", "run", *task, "--out", "tuned") == 0
    capsys.readouterr()

    def said(*arguments: object) -> str:
        assert acmoe(*arguments) == 2
        return capsys.readouterr().err

    refused = (
        "acmoe: tuned is a finetuning, a classifier of sentences; this takes a run of a language "
        "model, such as the pretrained one\n"
    )
    for command in (
        ("evaluate",),
        ("generate", "--prompt", "a"),
        ("analyze",),
        ("finetune", *task),
    ):
        assert said(command[0], "tuned", *command[1:]) == refused
    holds = "acmoe: {} holds a {}, not a {}; choose another folder\n"
    other = said("train", "switch-nano", "--out", "tuned")
    assert other == holds.format("tuned", "finetuning", "language-run")
    own = said("finetune", "run", *task, "--out", "run")
    assert own == holds.format("run", "language-run", "finetuning")
