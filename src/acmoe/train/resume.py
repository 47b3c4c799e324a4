"""Checkpoints of a run: a resumed run equals the uninterrupted one, bit by bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.evaluate.run import EMA, checkpoints
from acmoe.models.checkpoint import load
from acmoe.storage.shards import SHARDS, read_shards, stored_tensors
from acmoe.train.checkpoint import CheckpointStore, restoring
from acmoe.train.metrics_log import MetricsLog
from acmoe.train.threads import threads_note
from acmoe.train.trainer import Trainer

Read = TypeVar("Read")


class Checkpoint(NamedTuple):
    """A checkpoint that has been read, except for the tensors in `shards`."""

    shards: Path | None  # None: the whole tensors are here
    model: nn.Module | None
    average: nn.Module | None
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def resume_run(
    store: CheckpointStore | None, trainer: Trainer, log: MetricsLog
) -> tuple[int, list[str]]:
    """Load the latest checkpoint that is intact; return its step, or 0, and what to tell the user.

    A damaged checkpoint is set aside, and the one before it is taken.
    """
    step = 0
    notes: list[str] = []
    if store is not None:
        found, notes = _read_intact(store, trainer)
        if found is not None:
            with restoring(store.latest() or store.folder):
                step = _restore(trainer, log, found, notes)
    complaint = log.open(step)
    return step, [*notes, *([complaint] if complaint else [])]


def _read_intact(store: CheckpointStore, trainer: Trainer) -> tuple[Checkpoint | None, list[str]]:
    """Read the latest intact checkpoint on every process; the first one has the notes."""
    read = partial(_read, store, averaged=trainer.average is not None)
    with trainer.ranks.first_before_others():  # the first process sets damaged checkpoints aside
        if trainer.ranks.first:
            return read_latest(store, read)
        latest = store.latest()
        return None if latest is None else read(latest), []


def read_latest(
    store: CheckpointStore, read: Callable[[Path], Read]
) -> tuple[Read | None, list[str]]:
    """Read the latest checkpoint that is intact; return the result, and what to tell the user.

    `read` raises a UserError for a damaged folder, which is then set aside. The result is None
    where there is no checkpoint. Where all are damaged, the earliest stays and its error is raised.
    A file that is there and cannot be opened or read is not damaged: its error is raised.
    """
    notes: list[str] = []
    while (folder := store.latest()) is not None:
        try:
            return read(folder), notes
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise UserError(
                    f"{folder} cannot be read ({cause}); make it readable, nothing was changed"
                ) from cause
            earlier = checkpoints(store.folder)[:-1]
            check(
                bool(earlier),
                f"{error}; there is no earlier checkpoint, so that training then starts again",
            )
            aside = store.set_aside(folder)
            notes.append(f"{error}; kept as {aside}, going on from {earlier[-1].name}")
    return None, notes


def _read(store: CheckpointStore, folder: Path, averaged: bool) -> Checkpoint:
    """Read a checkpoint of one process whole; check the files of one that several wrote."""
    tensors, state = store.read(folder)
    if not tensors:
        return Checkpoint(folder / SHARDS, None, None, {}, state)
    average = load(folder / EMA) if averaged else None
    return Checkpoint(None, load(folder), average, tensors, state)


def _restore(trainer: Trainer, log: MetricsLog, found: Checkpoint, notes: list[str]) -> int:
    """Put a checkpoint into the trainer and the log; return its step."""
    state = found.state
    trainer.check_data(state)
    if found.shards is not None:
        places = trainer.empty_shards(stored_tensors(found.shards))
        read_shards(found.shards, places, together=trainer.ranks.mesh is not None)
        trainer.load_shards(places)
    elif found.model is not None:
        trainer.load_model(found.model.state_dict())
        trainer.load_state_tensors(found.tensors)
    if trainer.average is not None and found.average is not None:
        trainer.average.load(found.average.state_dict())
    trainer.batches.load_state_dict(state["data"])
    log.load_state_dict(state)
    if note := threads_note(state):
        notes.append(note)
    split = trainer.config.split
    if (before := state.get("split", split)) != split:  # absent in version 0.1
        notes.append(
            f"saved with split={before}, continued with split={split}: batch statistics and the "
            "capacity of experts are now those of other micro-batches"
        )
    return cast(int, state["step"])
