"""Finetune a pretrained run on SST-2, SST-5 or Banking-77.

Each epoch ends with a checkpoint, unless they are switched off, so the same call continues an
interrupted one; where the latest checkpoint is damaged, from the one before it. The report has the
test accuracy of the epoch with the best development accuracy.

B sentences.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.progress import Progress, progress_bars, silent
from acmoe.data.seeding import derive_seed
from acmoe.data.text.sentence_batches import (
    EncodedSentence,
    SentenceBatch,
    encode_sentences,
    sentence_batches,
)
from acmoe.data.text.sentences import Sentence, load_sentences, task_of
from acmoe.data.text.vocabulary import Vocabulary
from acmoe.data.transfer import to_device
from acmoe.errors import NonFiniteError, UserError, check
from acmoe.evaluate.finite import FiniteLogits
from acmoe.evaluate.run import CHECKPOINTS, METRICS, Run, open_run, step_folder
from acmoe.evaluate.saved import save_evaluation
from acmoe.evaluate.starts import record_start
from acmoe.models.checkpoint import load
from acmoe.runtime import autocast, pick_device, seeded
from acmoe.train.checkpoint import CheckpointStore, restore_rng, restoring, rng_tensors
from acmoe.train.classifier import (
    Classifier,
    pad_left,
    pad_to_multiple,
    pretrained_backbone,
    published_backbone,
    published_encoding,
    published_vocabulary,
)
from acmoe.train.health import TrainingStopped
from acmoe.train.metrics_log import append, drop_records_after
from acmoe.train.optim import adam, optimizer_tensors, restore_optimizer
from acmoe.train.resume import read_latest
from acmoe.train.run_folder import claim, write_vocabulary
from acmoe.train.threads import cpu_state, threads_note
from acmoe.train.trainer import apply_gradients

Split = dict[str, list[EncodedSentence]]
Tensors = dict[str, torch.Tensor]

KEPT = 2  # checkpoints: where the latest is damaged, the one before it is continued
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
    line for the log.
    Without `checkpoints` the best epoch is held in memory, and no trained model is left on disk.
    """
    run = source if isinstance(source, Run) else open_run(source)
    out = out or finetune_folder(run.folder, config)
    console = console or Console(stderr=True)
    device = pick_device(config.device)
    rows, origin = task_splits(load_sentences(config.task, data), config.seed)
    with claim(out, config), seeded(config.seed, device):
        store = CheckpointStore(out / CHECKPOINTS, keep=KEPT) if checkpoints else None
        finetuner = Finetuner(run, config, rows, device, store)
        write_vocabulary(finetuner.vocabulary, out)
        if note:
            console.print(f"{config.task}: {note}", highlight=False, markup=False, soft_wrap=True)
        accuracies = _train(finetuner, out / METRICS, console)
        best = _best(accuracies)
        finetuner.load_best(best)
        with progress_bars(console) as progress:
            test = finetuner.accuracy("test", progress)
    labels = torch.tensor([sentence.label for sentence in rows["test"]])
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
        majority=100 * labels.bincount().max().item() / len(labels),
    )
    save_evaluation(out, {"split": "test", "step": best, **report.to_json()})
    return report


def finetune_folder(run: Path, config: FinetuneConfig) -> Path:
    """Return the folder inside a run's folder that a finetuning of that config works in."""
    return run / "finetune" / f"{config.task}-{config.form}-seed{config.seed}"


def _train(finetuner: "Finetuner", metrics: Path, console: Console) -> list[float]:
    """Train the remaining epochs; return the development accuracy after every epoch."""
    config = finetuner.config
    accuracies, notes = finetuner.resume()
    _, complaint = drop_records_after(metrics, len(accuracies), expected=len(accuracies))
    for note in (*notes, *([complaint] if complaint else [])):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    if len(accuracies) < config.epochs:
        record_start(metrics.parent, finetuner.device, step=len(accuracies))
    for epoch in range(len(accuracies) + 1, config.epochs + 1):
        started = time.perf_counter()
        with progress_bars(console) as progress:
            loss = finetuner.train_epoch(epoch, progress)
            accuracies.append(finetuner.accuracy("dev", progress))
        seconds = time.perf_counter() - started
        record = {"kind": "epoch", "step": epoch, "loss": loss, "dev_accuracy": accuracies[-1]}
        append(metrics, {**record, "seconds": seconds})
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
        return {name: found[name] for name in ("train", "dev", "test")}, "all as published"
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


def _best(accuracies: Sequence[float]) -> int:
    """Return the first epoch, counted from 1, with the highest accuracy."""
    return 1 + max(range(len(accuracies)), key=lambda epoch: (accuracies[epoch], -epoch))


class Finetuner:
    """Model, optimizer and encoded sentences of one finetuning run.

    Without a store, `best_weights` holds the weights of the best epoch so far.
    """

    def __init__(
        self,
        run: Run,
        config: FinetuneConfig,
        rows: dict[str, list[Sentence]],
        device: torch.device,
        store: CheckpointStore | None,
    ) -> None:
        self.config, self.device, self.store = config, device, store
        self.best_weights: dict[str, torch.Tensor] = {}
        self.vocabulary: Vocabulary
        self.pretrained_step = int(run.checkpoint(config.which).name.split("-")[1])
        pretrained = run.model(config.which)
        if config.form == "clean":
            vocabulary = self.vocabulary = run.vocabulary()
            self.rows = {name: encode_sentences(found, vocabulary) for name, found in rows.items()}
            backbone = pretrained_backbone(pretrained, config)
        else:
            words = self.vocabulary = published_vocabulary([*rows["train"], *rows["dev"]])
            self.rows = {name: published_encoding(found, words) for name, found in rows.items()}
            backbone = published_backbone(pretrained, words, config)
        classes = len(task_of(config.task).classes)
        self.model = Classifier(backbone, classes, config).to(device)
        self.optimizer = adam(
            self.model, lr=config.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        )

    def train_epoch(self, epoch: int, progress: Progress = silent) -> float:
        """Train on every training sentence once; return the mean loss per sentence, in nats."""
        self.model.train()
        done, all_sentences = 0, len(self.rows["train"])
        total = torch.zeros((), device=self.device)
        for batch in self._batches("train", epoch):
            for part in _micro_batches(batch, self.config.split):
                with autocast(self.config.precision, self.device):
                    logits = self.model(part)
                loss = nn.functional.cross_entropy(logits.float(), part.labels, reduction="sum")
                (loss / len(batch.labels)).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            apply_gradients(self.optimizer)
            done += len(batch.labels)
            progress(f"epoch {epoch}/{self.config.epochs}, sentences", done, all_sentences)
        mean = float(total) / all_sentences
        if not math.isfinite(mean):
            raise self._stopped(f"epoch {epoch} gave a loss of {mean}")
        return mean

    def _stopped(self, what: str) -> TrainingStopped:
        good = None if self.store is None else self.store.latest()
        return TrainingStopped(
            f"{what}; "
            f"{f'the last good checkpoint is {good}' if good else 'nothing was saved before'}; "
            f"try a lower lr than {self.config.lr}, in another folder"
        )

    @torch.no_grad()
    def accuracy(self, split: str, progress: Progress = silent) -> float:
        """Return the percentage of the split's sentences that are classified correctly."""
        done, all_sentences = 0, len(self.rows[split])
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        finite = FiniteLogits()
        with autocast(self.config.precision, self.device):
            for batch in self._batches(split):
                logits = self.model(batch)
                finite.add(logits)
                right += (logits.argmax(-1) == batch.labels).sum()
                done += len(batch.labels)
                progress(f"{split} sentences", done, all_sentences)
        try:
            finite.check(f"{self.config.task}, {split}")
        except NonFiniteError as error:
            raise self._stopped(str(error).partition(";")[0]) from error
        return 100 * int(right) / all_sentences

    def _batches(self, split: str, epoch: int | None = None) -> Iterator[SentenceBatch]:
        """Yield every sentence once; training in the clean form shuffles them in each epoch."""
        clean = self.config.form == "clean"
        for batch in sentence_batches(
            self.rows[split],
            batch=self.config.batch,
            seed=self.config.seed,
            epoch=epoch or 0,
            shuffle=clean and epoch is not None,
        ):
            padded = pad_to_multiple(batch) if clean else pad_left(batch)
            yield SentenceBatch(*(to_device(tensor, self.device) for tensor in padded))

    def save_epoch(self, epoch: int, accuracies: list[float]) -> None:
        """Write a checkpoint; without a store, hold the weights in memory if they are the best."""
        if self.store is None:
            if epoch == _best(accuracies):
                self.best_weights = {n: v.clone() for n, v in self.model.state_dict().items()}
            return
        tensors = optimizer_tensors(self.optimizer, self.model) | rng_tensors(self.device)
        for name, value in self.model.head.state_dict().items():
            tensors[f"head/{name}"] = value
        state = {
            "accuracies": accuracies,
            "best": {"step": _best(accuracies)},
            "pretrained_step": self.pretrained_step,
            "records": epoch,
            **cpu_state(),
        }
        self.store.save(epoch, self.model.backbone, tensors, state)

    def resume(self) -> tuple[list[float], list[str]]:
        """Load the latest intact checkpoint; return the accuracies up to it, and notes to print."""
        if self.store is None:
            return [], []
        store = self.store
        found, notes = read_latest(store, lambda folder: _read(store, folder))
        if found is None:
            return [], notes
        note = threads_note(found[-1])
        with restoring(store.latest() or store.folder):
            return self._restore(store, *found), [*notes, *([note] if note else [])]

    def _restore(
        self,
        store: CheckpointStore,
        backbone: Tensors,
        head: Tensors,
        tensors: Tensors,
        state: dict[str, Any],
    ) -> list[float]:
        """Load a checkpoint that was read; return its accuracies."""
        before, now = state["pretrained_step"], self.pretrained_step
        check(
            before == now,
            f"{store.folder.parent} began with step {before} of the run, whose "
            f"{self.config.which} checkpoint is now step {now}; finetune into another folder",
        )
        self._load(backbone, head)
        restore_optimizer(self.optimizer, self.model, tensors)
        restore_rng(tensors, self.device)
        return list(state["accuracies"])

    def load_best(self, best: int) -> None:
        """Load the weights of the best epoch."""
        if self.store is None:
            self.model.load_state_dict(self.best_weights)
            return
        try:
            backbone, head, _, _ = _read(self.store, step_folder(self.store.folder, best))
        except UserError as error:
            raise UserError(
                f"epoch {best}, the best, cannot be read: {str(error).partition(';')[0]}; delete "
                f"{self.store.folder.parent} and give the same command to finetune again"
            ) from error
        self._load(backbone, head)

    def _load(self, backbone: Tensors, head: Tensors) -> None:
        self.model.backbone.load_state_dict(backbone)
        self.model.head.load_state_dict(head)


def _read(store: CheckpointStore, folder: Path) -> tuple[Tensors, Tensors, Tensors, dict[str, Any]]:
    """Return the weights of backbone and head, the training tensors and the state."""
    tensors, state = store.read(folder)
    head = {key.removeprefix("head/"): v for key, v in tensors.items() if key[:5] == "head/"}
    return load(folder).state_dict(), head, tensors, state


def _micro_batches(batch: SentenceBatch, split: int) -> Iterator[SentenceBatch]:
    """Split a batch into `split` parts, or fewer where it has fewer sentences."""
    for parts in zip(*(tensor.chunk(split) for tensor in batch), strict=True):
        yield SentenceBatch(*parts)
