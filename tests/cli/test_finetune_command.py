"""`acmoe finetune` names the wrong kind of folder, unknown words and the splits it draws."""

import json
from pathlib import Path

import pytest

from command import acmoe
from tiny_runs import byte_corpus, tiny_run, trained, word_corpus


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


def test_unknown_words_and_splits_that_are_not_the_published_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = word_corpus(tmp_path)
    size = len(json.loads((corpus / "vocabulary.json").read_text())["symbols"])
    overrides = ("data.name=words", f"data.folder={corpus}", f"model.vocab_size={size}", "steps=1")
    trained(tiny_run(corpus, *overrides), tmp_path / "run")
    Path("task").mkdir()
    Path("task", "train.tsv").write_text("the cat is good\t1\nthe dogs is poor\t0\n")
    Path("task", "dev.tsv").write_text("red cat\t1\n")
    task = ("--task", "sst2", "--data", "task", "--epochs", 1, "--device", "cpu")
    assert acmoe("finetune", "run", *task) == 0
    out, err = capsys.readouterr()
    # `is` twice, `good` and `poor`; every sentence ends with <eos>: 5 + 5 + 3 tokens.
    assert "sst2: 4 of 13 tokens are words that the vocabulary lacks; the model reads <unk>" in err
    assert "; test is the published development set; " in out
    Path("task", "train.tsv").write_text("the cat\t1\nthe dogs\t0\n")
    Path("task", "test.tsv").write_text("the cat\t1\n")
    assert acmoe("finetune", "run", *task, "--out", "known") == 0
    out, err = capsys.readouterr()
    assert "<unk>" not in err and "published" not in out
