"""Finetune a pretrained run on SST-2, SST-5 or Banking-77, and report its accuracies.

Each epoch ends with a checkpoint, unless they are switched off, so the same call continues an
interrupted one; where the latest checkpoint is damaged, from the one before it. The report has the
test accuracy of the epoch with the best development accuracy.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.progress import progress_bars
from acmoe.data.seeding import derive_seed
from acmoe.data.text.registry import dataset, how_to_prepare
from acmoe.data.text.sentences import Sentence, has_sentences, load_sentences
from acmoe.errors import check
from acmoe.evaluate.run import CHECKPOINTS, METRICS, Run, open_run
from acmoe.evaluate.saved import save_evaluation
from acmoe.evaluate.starts import record_start
from acmoe.runtime import pick_device, seeded
from acmoe.storage.lines import append_line
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.finetune.finetuner import Finetuner, best_epoch
from acmoe.train.metrics_log import drop_records_after
from acmoe.train.run_folder import claim, write_vocabulary

KEPT = 2  # checkpoints: where the latest is damaged, the one before it is continued
PUBLISHED = "all as published"  # the origin of splits that are not drawn here
HELD_OUT = 10  # a missing development set is one training sentence in ten


@dataclass(frozen=True, kw_only=True)
class FinetuneReport:
    """The accuracies of a finetuned classifier, and the sentences behind them."""

    task: str
    form: str
    folder: str
    pretrained_step: int  # step of the run's checkpoint
    sentences: dict[str, int]  # in train, dev and test
    splits: str  # where the three splits come from
    dev_accuracies: tuple[float, ...]  # percent, by epoch
    best_epoch: int
    dev_accuracy: float  # percent, at that epoch; the paper's code calls it test accuracy
    test_accuracy: float  # percent, at that epoch
    majority: float  # percent of the test set in its most frequent class

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def finetune(
    source: Run | Path | str,
    config: FinetuneConfig,
    data: Path | str,
    *,
    out: Path | None = None,
    checkpoints: bool = True,
    console: Console | None = None,
    note: str = "",
) -> FinetuneReport:
    """Finetune a run on the task's files in the folder `data`.

    `out` is the folder to work in, `finetune_folder(run.folder, config)` by default. `note` is a
    line for the log. Without `checkpoints` the best epoch is held in memory, and no trained model
    is left on disk.
    """
    run = source if isinstance(source, Run) else open_run(source)
    out = out or finetune_folder(run.folder, config)
    console, device = console or Console(stderr=True), pick_device(config.device)
    rows, origin = task_splits(_load_task(config.task, Path(data)), config.seed)
    with claim(out, config), seeded(config.seed, device):
        store = CheckpointStore(out / CHECKPOINTS, keep=KEPT) if checkpoints else None
        finetuner = Finetuner(run, config, rows, device, store)
        for line in filter(None, (note, finetuner.unknown_words())):
            console.print(f"{config.task}: {line}", highlight=False, markup=False, soft_wrap=True)
        try:
            accuracies = _train(finetuner, out / METRICS, console)
            best = best_epoch(accuracies)
            finetuner.load_best(best)
            with progress_bars(console) as progress:
                test = finetuner.accuracy("test", progress)
        except KeyboardInterrupt:
            if store is None:
                raise
            raise store.interrupted() from None
    report = FinetuneReport(
        task=config.task,
        form=config.form,
        folder=str(out),
        pretrained_step=finetuner.pretrained_step,
        sentences={split: len(found) for split, found in rows.items()},
        splits=origin,
        dev_accuracies=tuple(accuracies),
        best_epoch=best,
        dev_accuracy=accuracies[best - 1],
        test_accuracy=test,
        majority=majority_share(rows["test"]),
    )
    save_evaluation(out, {"split": "test", "step": best, **report.to_json()})
    return report


def majority_share(sentences: list[Sentence]) -> float:
    """Return the percentage of sentences in the most frequent class."""
    labels = torch.tensor([sentence.label for sentence in sentences])
    return float(100 * labels.bincount().max().item() / len(labels))


def finetune_folder(run: Path, config: FinetuneConfig) -> Path:
    """Return the folder inside a run's folder that a finetuning of that config works in."""
    return run / "finetune" / f"{config.task}-{config.form}-seed{config.seed}"


def _load_task(task: str, data: Path) -> dict[str, list[Sentence]]:
    """Load the splits of a task; a UserError names the command that prepares missing ones."""
    check(
        has_sentences(task, data),
        f"{dataset(task).title} is not in {data}; {how_to_prepare(task, data)}; or give its "
        "folder with --data",
    )
    return load_sentences(task, data)


def _train(finetuner: Finetuner, metrics: Path, console: Console) -> list[float]:
    """Train the remaining epochs; return the development accuracy after every epoch."""
    config = finetuner.config
    accuracies, notes = finetuner.resume()  # raises where the data are others than before
    write_vocabulary(finetuner.vocabulary, metrics.parent)
    _, complaint = drop_records_after(metrics, len(accuracies), expected=len(accuracies))
    for note in (*notes, *([complaint] if complaint else [])):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    if accuracies:
        console.print(f"{config.task}: continuing after epoch {len(accuracies)}", highlight=False)
    if len(accuracies) < config.epochs:
        record_start(metrics.parent, finetuner.device, step=len(accuracies))
    for epoch in range(len(accuracies) + 1, config.epochs + 1):
        started = time.perf_counter()
        with progress_bars(console) as progress:
            loss = finetuner.train_epoch(epoch, progress)
            accuracies.append(finetuner.accuracy("dev", progress))
        seconds = time.perf_counter() - started
        record = {"kind": "epoch", "step": epoch, "loss": loss, "dev_accuracy": accuracies[-1]}
        append_line(metrics, {**record, "seconds": seconds})
        finetuner.save_epoch(epoch, accuracies)
        console.print(
            f"{config.task}: epoch {epoch}/{config.epochs}  loss {loss:.4f} nats  development "
            f"accuracy {accuracies[-1]:.2f} %  {seconds:.0f} s",
            highlight=False,
        )
    return accuracies


def task_splits(
    found: dict[str, list[Sentence]], seed: int
) -> tuple[dict[str, list[Sentence]], str]:
    """Make train, dev and test from the published splits; also return how, in words."""
    if {"dev", "test"} <= set(found):
        return {name: found[name] for name in ("train", "dev", "test")}, PUBLISHED
    generator = torch.Generator().manual_seed(derive_seed(seed, "held-out sentences"))
    order = torch.randperm(len(found["train"]), generator=generator).tolist()
    cut = max(1, len(order) // HELD_OUT)
    held = {
        "train": [found["train"][i] for i in order[cut:]],
        "dev": [found["train"][i] for i in order[:cut]],
    }
    share = f"dev is 1 in {HELD_OUT} training sentences, drawn with seed {seed}"
    if "test" in found:
        return {**held, "test": found["test"]}, share
    return {**held, "test": found["dev"]}, f"{share}; test is the published development set"
