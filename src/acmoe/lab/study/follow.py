"""A training course for a cell: `acmoe train`'s own loop, without checkpoints on the way.

A cell is minutes long and is run again if it is killed, so nothing is saved; the weights compared
are those after the last step, the same step for every condition.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from acmoe.evaluate.run import CHECKPOINTS, METRICS, read_metrics
from acmoe.lab.study.outcome import (
    Curve,
    News,
    curve_mean,
    peak_memory,
    scale_metrics,
    step_milliseconds,
)
from acmoe.lab.study.scale_statistics import ScaleStatistics
from acmoe.models.count import count_parameters
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.course import AnyTrainer, Course
from acmoe.train.display import Display
from acmoe.train.interrupt import Interrupts
from acmoe.train.journal import Journal, Scored


def follow(
    trainer: AnyTrainer,
    journal: Journal,
    folder: Path,
    *,
    steps: int,
    validate: Callable[[], Scored],
    news: News,
) -> CheckpointStore:
    """Train to the last step; figures go to the folder's metrics.jsonl."""
    store = CheckpointStore(folder / CHECKPOINTS, keep=1)

    def validated() -> Scored:
        score = validate()
        news(f"validation loss {score.loss:.4f}")
        return score

    journal.open(0)
    quiet = Console(file=io.StringIO())
    with Display(folder.name, steps, quiet) as display:
        Course(
            trainer=trainer,
            journal=journal,
            store=store,
            display=display,
            asked=Interrupts(),  # not entered: whoever started the worker ends it
            steps=steps,
            validate=validated,
            save=lambda step: None,
        ).run(0)
    return store


def course_metrics(
    trainer: AnyTrainer,
    journal: Journal,
    folder: Path,
    curve: Curve,
    scales: Sequence[ScaleStatistics],
    *,
    unit: str,
) -> dict[str, float]:
    """What the course itself tells: its cost, the height of its curve, how far M went."""
    device = next(trainer.model.parameters()).device
    return {
        "step_ms": step_milliseconds(records_of(folder, "train"), unit, trainer.per_step),
        "train_seconds": journal.seconds,
        "parameters": float(count_parameters(trainer.model).total),
        **peak_memory(device),
        "valid": curve[-1][1],
        "valid_curve": curve_mean(curve),
        **scale_metrics(scales),
    }


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / METRICS) if record["kind"] == kind]


def curve_of(folder: Path, kind: str, name: str) -> Curve:
    return [(record["step"], record[name]) for record in records_of(folder, kind)]
