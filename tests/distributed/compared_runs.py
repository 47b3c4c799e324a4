"""Runs of one process and of several: their settings, copies half-way, and losses."""

import shutil
from pathlib import Path

from tiny_runs import records

# Images without anything that each process draws for itself.
PLAIN_IMAGES = (
    "augment.shift=0",
    "augment.flip=0",
    "augment.erase=0",
    "augment.mixup=0",
    "augment.cutmix=0",
    "model.drop_path=0",
    "model.router.base.noise=0",
    "model.expert_dropout=0",
    "model.capacity_factor=none",  # each process drops tokens of its own
    "steps=4",
    "log_every=1",
    "eval_every=4",
    "eval_batch=16",  # three batches: the second process runs one that does not count
    "model.router.statistics_group=global",
)


def half_of(run: Path, copy: Path) -> None:
    """Copy a run without its last checkpoint, as it was after half of its steps."""
    shutil.copytree(run, copy)
    shutil.rmtree(max((copy / "checkpoints").glob("step-*")))


def losses(run: Path, kind: str = "train") -> list[float]:
    return [record["loss"] for record in records(run) if record["kind"] == kind]


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
