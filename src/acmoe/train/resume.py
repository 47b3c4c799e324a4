"""Checkpoints of a run: a resumed run equals the uninterrupted one, bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.evaluate.run import EMA, checkpoints
from acmoe.models.checkpoint import load
from acmoe.train.checkpoint import CheckpointStore, restoring
from acmoe.train.metrics_log import MetricsLog
from acmoe.train.threads import cpu_state, threads_note
from acmoe.train.trainer import Trainer

Read = TypeVar("Read")
# Model, averaged model, training tensors, JSON state.
Checkpoint = tuple[nn.Module, nn.Module | None, dict[str, Tensor], dict[str, Any]]


def save_run(store: CheckpointStore, step: int, trainer: Trainer, log: MetricsLog) -> None:
    """Write a checkpoint of everything that an update changes; rank 0 writes for all processes."""
    # Without this check a run folder that was renamed under way would be split into two.
    check(
        store.folder.is_dir(),
        f"{store.folder} is gone, so step {step} is not saved: the run folder was renamed or "
        "deleted under way; continue it with --out and its new name",
    )
    state: dict[str, Any] = {
        **log.state_dict(),
        "data": trainer.batches.state_dict(),
        **cpu_state(),
        **trainer.data_checksum(),
    }
    log.sync()
    model, tensors = trainer.whole_model(), trainer.state_tensors()
    if trainer.ranks.first:
        store.save(step, model, tensors, state, average=trainer.average)
    trainer.ranks.wait()  # none goes on, or ends, before the checkpoint is there


def resume_run(
    store: CheckpointStore | None, trainer: Trainer, log: MetricsLog
) -> tuple[int, list[str]]:
    """Load the latest checkpoint that is intact; return its step, or 0, and what to tell the user.

    A damaged checkpoint is set aside, and the one before it is taken.
    """
    notes: list[str] = []
    step = 0
    if store is not None:
        averaged = trainer.average is not None

        def read(folder: Path) -> Checkpoint:
            return _read(store, folder, averaged)

        found, notes = None, []
        with trainer.ranks.first_before_others():  # which has set damaged checkpoints aside
            if trainer.ranks.first:
                found, notes = read_latest(store, read)
            elif (latest := store.latest()) is not None:
                found = read(latest)
        if found is not None:
            with restoring(store.latest() or store.folder):
                step = _restore(trainer, log, *found, notes)
    complaint = log.open(step)
    return step, [*notes, *([complaint] if complaint else [])]


def read_latest(
    store: CheckpointStore, read: Callable[[Path], Read]
) -> tuple[Read | None, list[str]]:
    """Read the latest checkpoint that is intact; return the result, and what to tell the user.

    `read` raises a UserError for a damaged folder, which is then set aside. The result is None
    where there is no checkpoint. Where all are damaged, the earliest stays and its error is raised.
    """
    notes: list[str] = []
    while (folder := store.latest()) is not None:
        try:
            return read(folder), notes
        except UserError as error:
            earlier = checkpoints(store.folder)[:-1]
            check(bool(earlier), f"{error}; there is no earlier checkpoint")
            aside = store.set_aside(folder)
            notes.append(f"{error}; kept as {aside}, going on from {earlier[-1].name}")
    return None, notes


def _read(store: CheckpointStore, folder: Path, averaged: bool) -> Checkpoint:
    """Return the model, the averaged model if there is one, the training tensors and the state."""
    tensors, state = store.read(folder)
    return load(folder), load(folder / EMA) if averaged else None, tensors, state


def _restore(
    trainer: Trainer,
    log: MetricsLog,
    model: nn.Module,
    average: nn.Module | None,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    notes: list[str],
) -> int:
    """Put a checkpoint into the trainer and the log; return its step."""
    trainer.check_data(state)
    trainer.load_model(model.state_dict())
    trainer.load_state_tensors(tensors)
    if trainer.average is not None and average is not None:
        trainer.average.load(average.state_dict())
    trainer.batches.load_state_dict(state["data"])
    log.load_state_dict(state)
    if note := threads_note(state):
        notes.append(note)
    return cast(int, state["step"])
