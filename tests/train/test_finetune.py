"""Finetuning learns what can be learned, in both forms, and continues where it stopped."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from acmoe.cli import main
from acmoe.config.text.finetune import FinetuneConfig, finetune_config
from acmoe.data.progress import Progress
from acmoe.data.text.sentence_batches import EncodedSentence, collate
from acmoe.data.text.sentences import Sentence
from acmoe.errors import UserError
from acmoe.evaluate.run import Run, open_run
from acmoe.train.finetune import finetune, task_splits
from acmoe.train.finetune.classifier import (
    Classifier,
    pad_left,
    pad_to_multiple,
    pretrained_backbone,
    published_backbone,
    published_encoding,
    published_vocabulary,
)
from acmoe.train.finetune.finetuner import Finetuner
from acmoe.train.health import TrainingStopped
from tiny_runs import QUIET, byte_corpus, records, tiny_run, trained, word_corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pretrained")
    return open_run(trained(tiny_run(byte_corpus(folder), "steps=10"), folder / "run"))


def write_task(folder: Path, **counts: int) -> Path:
    """A sentence is of class 1 when its last word is `good`: chance is one half."""
    generator = torch.Generator().manual_seed(0)
    for split, count in counts.items():
        rows = ["sentence\tlabel"]
        for _ in range(count):
            number, label = torch.randint(0, 1000, (2,), generator=generator).tolist()
            rows.append(f"film {number} is {'good' if label % 2 else 'poor'}\t{label % 2}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), train=160, dev=40, test=60)


@pytest.fixture(scope="module")
def short_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("short"), train=64, dev=20, test=20)


def settings(form: str = "clean", **changes: object) -> FinetuneConfig:
    config = finetune_config("sst2", form)  # type: ignore[arg-type]
    return replace(config, **{"epochs": 3, "lr": 1e-2, "device": "cpu", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [pytest.param("clean", marks=pytest.mark.slow), "paper"])
def test_a_toy_task_is_learned_well_above_chance(
    form: str, run: Run, task: Path, tmp_path: Path
) -> None:
    report = finetune(run, settings(form), task, out=tmp_path / "out", console=QUIET)
    assert report.test_accuracy > 85
    assert report.majority < 65
    assert report.sentences == {"train": 160, "dev": 40, "test": 60}
    assert report.dev_accuracy == max(report.dev_accuracies)
    assert report.dev_accuracies[report.best_epoch - 1] == report.dev_accuracy
    assert report.pretrained_step == 10
    json.dumps(report.to_json())


def test_stopped_between_epochs_it_continues_to_the_same_result(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    task = write_task(tmp_path, train=16, dev=8, test=8)
    whole = finetune(run, config, task, out=tmp_path / "whole", console=QUIET)

    class Killed(BaseException):
        pass

    from acmoe.train.finetune import finetuner as module

    real, calls = module.Finetuner.train_epoch, []

    def dies_in_the_second(self: module.Finetuner, epoch: int, progress: module.Progress) -> float:
        calls.append(epoch)
        if len(calls) == 2:
            raise Killed
        return real(self, epoch, progress)

    monkeypatch.setattr(module.Finetuner, "train_epoch", dies_in_the_second)
    with pytest.raises(Killed):
        finetune(run, config, task, out=tmp_path / "parts", console=QUIET)
    parts = finetune(run, config, task, out=tmp_path / "parts", console=QUIET)
    assert calls == [1, 2, 2, 3]
    assert replace(parts, folder="") == replace(whole, folder="")
    losses = [
        [record["loss"] for record in records(tmp_path / name)] for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.parametrize("stop", [1, 2])
def test_ctrl_c_says_what_is_saved_and_how_to_continue(
    stop: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, config = Finetuner.train_epoch, settings(epochs=2)
    task = write_task(tmp_path, train=16, dev=8, test=8)

    def interrupted(self: Finetuner, epoch: int, progress: Progress) -> float:
        if epoch == stop:
            raise KeyboardInterrupt
        return real(self, epoch, progress)

    out, console = tmp_path / "out", Console(file=io.StringIO(), record=True, width=200)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as end:
        patch.setattr(Finetuner, "train_epoch", interrupted)
        finetune(run, config, task, out=out, console=console)
    saved = ("nothing was saved yet", f"the last checkpoint is {out}/checkpoints/step-00000001")
    assert str(end.value) == f"{saved[stop - 1]}; give the same command again to continue"
    finetune(run, config, task, out=out, console=console)
    assert ("sst2: continuing after epoch 1\n" in console.export_text()) == (stop == 2)


def test_other_sentences_are_refused_and_the_vocabulary_stays(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, train=16, dev=8, test=8)
    finetune(run, settings("paper", epochs=1), task, out=tmp_path / "out", console=QUIET)
    saved = (tmp_path / "out" / "vocabulary.json").read_bytes()
    with (task / "train.tsv").open("a") as file:
        file.write("another film\t1\n")
    options = ["--task", "sst2", "--form", "paper", "--epochs", "1", "--lr", "1e-2"]
    where = ["--data", str(task), "--out", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        main(["finetune", str(run.folder), *options, *where])
    assert stop.value.code == 2
    assert "begun with other training or development sentences" in capsys.readouterr().err
    assert (tmp_path / "out" / "vocabulary.json").read_bytes() == saved


def test_without_checkpoints_the_best_epoch_is_held_and_nothing_is_left(
    run: Run, short_task: Path, tmp_path: Path
) -> None:
    config = settings(epochs=4, lr=0.1, seed=2)  # wild enough that the last epoch is not the best
    saved = finetune(run, config, short_task, out=tmp_path / "saved", console=QUIET)
    held = finetune(
        run, config, short_task, out=tmp_path / "held", checkpoints=False, console=QUIET
    )
    assert saved.best_epoch < 4
    assert replace(held, folder="") == replace(saved, folder="")
    assert not (tmp_path / "held" / "checkpoints").exists()


def test_the_work_is_kept_inside_the_runs_folder(short_task: Path, tmp_path: Path) -> None:
    task = short_task
    config = tiny_run(byte_corpus(tmp_path), "steps=1")
    folder = trained(config, tmp_path / "run")
    one_epoch = replace(settings(), epochs=1, seed=4)
    report = finetune(folder, one_epoch, task, console=QUIET)
    assert report.folder == str(folder / "finetune" / "sst2-clean-seed4")
    again = finetune(folder, one_epoch, task, console=QUIET)
    assert again == report
    with pytest.raises(UserError, match=r"lr=0.01, not 0.5"):
        finetune(folder, replace(one_epoch, lr=0.5), task, console=QUIET)


def test_padding_changes_no_logit_of_the_clean_form(run: Run) -> None:
    config = replace(settings(), dropout=0.0)
    backbone = pretrained_backbone(run.model(), config)
    model = Classifier(backbone, 2, config).eval()
    short, long = (EncodedSentence(np.arange(1, n + 1), 0) for n in (5, 12))
    both = collate([short, long])
    with torch.no_grad():
        together, alone, wide = model(both), model(collate([short])), model(pad_to_multiple(both))
    assert (
        pad_to_multiple(both).tokens.shape == (2, 32)
        and pad_to_multiple(both).token_mask.sum() == 17
    )
    assert torch.allclose(together[0], alone[0], atol=1e-6)
    assert torch.allclose(together, wide, atol=1e-6)


def test_a_batch_that_is_wide_enough_is_not_widened() -> None:
    batch = collate([EncodedSentence(np.arange(32), 0)])
    assert pad_to_multiple(batch).tokens.shape == (1, 32)
    assert pad_to_multiple(batch).last.tolist() == [31]


def test_padding_changes_the_logits_of_the_papers_form(run: Run) -> None:
    config = replace(settings("paper"), dropout=0.0)
    model = Classifier(pretrained_backbone(run.model(), config), 2, config).eval()
    short, long = (EncodedSentence(np.arange(1, n + 1), 0) for n in (5, 12))
    with torch.no_grad():
        together = model(pad_left(collate([short, long])))
        alone = model(pad_left(collate([short])))
    assert not torch.allclose(together[0], alone[0], atol=1e-6)


def test_left_padding_ends_every_sentence_at_the_last_position() -> None:
    batch = pad_left(
        collate([EncodedSentence(np.array([7, 8]), 1), EncodedSentence(np.array([1, 2, 3]), 0)])
    )
    assert batch.tokens.tolist() == [[0, 7, 8], [1, 2, 3]]
    assert batch.last.tolist() == [2, 2]
    assert batch.labels.tolist() == [1, 0]


def test_the_papers_form_rebuilds_the_vocabulary_and_keeps_the_blocks(run: Run) -> None:
    sentences = [Sentence("A Good film", 1), Sentence("a poor <unk> film", 0)]
    vocabulary = published_vocabulary(sentences)
    assert vocabulary.symbols == ("<eos>", "<unk>", "CLS", "S", "a", "good", "film", "poor")
    encoded = published_encoding([Sentence("Good BOOK", 1)], vocabulary)
    assert encoded[0].tokens.tolist() == [2, 5, 1, 3]  # CLS good <unk> S
    pretrained = run.model()
    backbone = published_backbone(pretrained, vocabulary, settings("paper"))
    assert backbone.embed.weight.shape == (8, 16)
    old, new = pretrained.state_dict(), backbone.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in new if "embed." not in name)


def test_missing_splits_are_drawn_from_the_training_sentences() -> None:
    train = [Sentence(f"text {n}", n % 2) for n in range(50)]
    dev, test = [Sentence("dev", 0)], [Sentence("test", 1)]
    rows, origin = task_splits({"train": train, "dev": dev, "test": test}, seed=0)
    assert (rows["train"], rows["dev"], rows["test"]) == (train, dev, test)
    assert origin == "all as published"
    rows, origin = task_splits({"train": train, "test": test}, seed=0)  # Banking-77
    assert len(rows["dev"]) == 5 and sorted(rows["train"] + rows["dev"]) == sorted(train)
    assert rows["test"] == test and "seed 0" in origin
    assert task_splits({"train": train, "test": test}, seed=0)[0] == rows
    assert task_splits({"train": train, "test": test}, seed=1)[0] != rows
    rows, origin = task_splits({"train": train, "dev": dev}, seed=0)  # SST-2 as in GLUE
    assert rows["test"] == dev and "published development set" in origin


def test_defaults_are_the_tables() -> None:
    paper = {task: finetune_config(task, "paper") for task in ("sst2", "sst5", "banking77")}
    assert {task: (c.epochs, c.lr, c.batch, c.split) for task, c in paper.items()} == {
        "sst2": (5, 1e-3, 16, 2),
        "sst5": (5, 1e-3, 16, 2),
        "banking77": (50, 1e-5, 16, 2),
    }
    assert finetune_config("sst2").lr == 1e-4
    with pytest.raises(UserError, match="task='sst3' is unknown; choose one of sst2, sst5"):
        finetune_config("sst3")


def test_stablemoe_cannot_take_another_vocabulary(tmp_path: Path, task: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "steps=1", "model.router=stable")
    folder = trained(config, tmp_path / "run")
    with pytest.raises(UserError, match="use form='clean'"):
        finetune(folder, settings("paper"), task, console=QUIET)


def test_a_word_modelsown_table_is_used(short_task: Path, tmp_path: Path) -> None:
    corpus = word_corpus(tmp_path)
    size = len(json.loads((corpus / "vocabulary.json").read_text())["symbols"])
    overrides = ("data.name=words", f"data.folder={corpus}", f"model.vocab_size={size}", "steps=1")
    folder = trained(tiny_run(corpus, *overrides), tmp_path / "run")
    report = finetune(folder, replace(settings(), epochs=1), short_task, console=QUIET)
    assert 0 <= report.test_accuracy <= 100
    saved = open_run(folder).model()
    tuned = Run(folder=folder / "finetune" / "sst2-clean-seed0", config=open_run(folder).config)
    assert tuned.model("last").embed.weight.shape == saved.embed.weight.shape


@pytest.mark.parametrize("checkpoints", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_classifier_that_overflows_has_no_accuracy(
    checkpoints: bool, run: Run, short_task: Path, tmp_path: Path
) -> None:
    # One update of 64 sentences: the epoch's loss is finite, the weights after it are about 1e30.
    config = settings(lr=1e30, batch=64, epochs=1)
    with pytest.raises(TrainingStopped, match=r"logits are not all finite in batch 1 of 1 of sst2"):
        finetune(
            run,
            config,
            short_task,
            out=tmp_path / "out",
            checkpoints=checkpoints,
            console=QUIET,
        )
    assert not (tmp_path / "out" / "metrics.jsonl").read_text()
