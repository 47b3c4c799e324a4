"""Checkpoints of a run: a resumed run equals the uninterrupted one, bit by bit."""

from typing import Any, cast

from acmoe.evaluate.run import EMA
from acmoe.models.checkpoint import load
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.metrics_log import MetricsLog
from acmoe.train.trainer import Trainer


def save_run(store: CheckpointStore, step: int, trainer: Trainer, log: MetricsLog) -> None:
    """Write a checkpoint of everything that an update changes."""
    state: dict[str, Any] = {
        **log.state_dict(),
        "data": trainer.batches.state_dict(),
        **trainer.data_checksum(),
    }
    tensors = trainer.state_tensors()
    store.save(step, trainer.model, tensors, state, average=trainer.average)


def resume_run(store: CheckpointStore | None, trainer: Trainer, log: MetricsLog) -> int:
    """Load the latest checkpoint, if there is one; return its step, or 0."""
    folder = None if store is None else store.latest()
    if store is None or folder is None:
        log.open(0)
        return 0
    tensors, state = store.read(folder)
    trainer.check_data(state)
    trainer.model.load_state_dict(load(folder).state_dict())
    trainer.load_state_tensors(tensors)
    if trainer.average is not None:
        trainer.average.load(load(folder / EMA).state_dict())
    trainer.batches.load_state_dict(state["data"])
    step = cast(int, state["step"])
    log.load_state_dict(state)
    log.open(step)
    return step
