"""Model, optimizer and sentences of one finetuning: its epochs, accuracies and checkpoints.

B sentences.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.progress import Progress, silent
from acmoe.data.text.sentence_batches import SentenceBatch, encode_sentences, sentence_batches
from acmoe.data.text.sentences import Sentence, task_of
from acmoe.data.text.vocabulary import Vocabulary, WordVocabulary
from acmoe.data.transfer import to_device
from acmoe.errors import NonFiniteError, UserError, check
from acmoe.evaluate.finite import FiniteLogits
from acmoe.evaluate.run import Run, step_folder
from acmoe.models.checkpoint import load
from acmoe.runtime import autocast
from acmoe.train.checkpoint import CheckpointStore, last_good, restoring
from acmoe.train.finetune.classifier import (
    Classifier,
    pad_left,
    pad_to_multiple,
    pretrained_backbone,
    published_backbone,
    published_encoding,
    published_vocabulary,
)
from acmoe.train.health import TrainingStopped
from acmoe.train.optim import adam, optimizer_tensors, restore_optimizer
from acmoe.train.resume import read_latest
from acmoe.train.rng import restore_rng, rng_tensors
from acmoe.train.threads import cpu_state, threads_note
from acmoe.train.update import apply_gradients

Tensors = dict[str, torch.Tensor]


class SavedEpoch(NamedTuple):
    """A checkpoint that has been read."""

    backbone: Tensors
    head: Tensors
    training: Tensors  # optimizer and random generators
    state: dict[str, Any]


def best_epoch(accuracies: Sequence[float]) -> int:
    """Return the first epoch, counted from 1, with the highest accuracy."""
    return 1 + max(range(len(accuracies)), key=lambda epoch: (accuracies[epoch], -epoch))


def sentences_sha256(*splits: Sequence[Sentence]) -> str:
    """Return the checksum of the sentences and labels of splits."""
    text = json.dumps([[[one.text, one.label] for one in split] for split in splits])
    return hashlib.sha256(text.encode()).hexdigest()


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
        self.sentences_sha256 = sentences_sha256(rows["train"], rows["dev"])
        self.vocabulary: Vocabulary
        self.pretrained_step = run.step(config.which)
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

    def unknown_words(self) -> str:
        """Say how many tokens of the sentences are `<unk>`; empty where there is none."""
        if not isinstance(self.vocabulary, WordVocabulary):
            return ""
        sentences = [one.tokens for split in self.rows.values() for one in split]
        unknown = sum(int((tokens == self.vocabulary.unk_id).sum()) for tokens in sentences)
        if unknown == 0:
            return ""
        return (
            f"{unknown:,} of {sum(map(len, sentences)):,} tokens are words that the vocabulary "
            "lacks; the model reads <unk> instead"
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
            f"{what}; {last_good(good)}; try a lower lr than {self.config.lr}, in another folder"
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
            if epoch == best_epoch(accuracies):
                self.best_weights = {n: v.clone() for n, v in self.model.state_dict().items()}
            return
        tensors = optimizer_tensors(self.optimizer, self.model) | rng_tensors(self.device)
        for name, value in self.model.head.state_dict().items():
            tensors[f"head/{name}"] = value
        state = {
            "accuracies": accuracies,
            "best": {"step": best_epoch(accuracies)},
            "pretrained_step": self.pretrained_step,
            "sentences_sha256": self.sentences_sha256,
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
        note = threads_note(found.state)
        with restoring(store.latest() or store.folder):
            return self._restore(store, found), [*notes, *([note] if note else [])]

    def _restore(self, store: CheckpointStore, saved: SavedEpoch) -> list[float]:
        """Load a checkpoint that was read; return its accuracies."""
        state = saved.state
        before, now = state["pretrained_step"], self.pretrained_step
        check(
            before == now,
            f"{store.folder.parent} began with step {before} of the run, whose "
            f"{self.config.which} checkpoint is now step {now}; finetune into another folder",
        )
        check(
            # Absent in version 0.1.
            state.get("sentences_sha256", self.sentences_sha256) == self.sentences_sha256,
            f"{store.folder.parent} was begun with other training or development sentences; "
            "restore those, or finetune into another folder",
        )
        self._load(saved)
        restore_optimizer(self.optimizer, self.model, saved.training)
        restore_rng(saved.training, self.device)
        return list(state["accuracies"])

    def load_best(self, best: int) -> None:
        """Load the weights of the best epoch."""
        if self.store is None:
            self.model.load_state_dict(self.best_weights)
            return
        try:
            saved = _read(self.store, step_folder(self.store.folder, best))
        except UserError as error:
            raise UserError(
                f"epoch {best}, the best, cannot be read: {str(error).partition(';')[0]}; delete "
                f"{self.store.folder.parent} and give the same command to finetune again"
            ) from error
        self._load(saved)

    def _load(self, saved: SavedEpoch) -> None:
        self.model.backbone.load_state_dict(saved.backbone)
        self.model.head.load_state_dict(saved.head)


def _read(store: CheckpointStore, folder: Path) -> SavedEpoch:
    tensors, state = store.read(folder)
    head = {key.removeprefix("head/"): v for key, v in tensors.items() if key[:5] == "head/"}
    return SavedEpoch(load(folder).state_dict(), head, tensors, state)


def _micro_batches(batch: SentenceBatch, split: int) -> Iterator[SentenceBatch]:
    """Split a batch into `split` parts, or fewer where it has fewer sentences."""
    for parts in zip(*(tensor.chunk(split) for tensor in batch), strict=True):
        yield SentenceBatch(*parts)
