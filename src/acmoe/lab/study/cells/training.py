"""Train the model of a cell with the loop of `acmoe train`.

Most cells take minutes and are run again if they are killed, so nothing is saved. Conditions are
compared by the weights after the last step, the same step for all of them; the best are not kept.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from acmoe.evaluate.run import METRICS, read_metrics
from acmoe.lab.study.cells.outcome import (
    Curve,
    Notify,
    curve_mean,
    peak_memory,
    scale_metrics,
    step_milliseconds,
)
from acmoe.lab.study.cells.scale_statistics import ScaleStatistics
from acmoe.models.count import count_parameters
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.display import Display
from acmoe.train.loop import TrainLoop
from acmoe.train.metrics_log import MetricsLog, Record
from acmoe.train.signals import StopSignals
from acmoe.train.trainer import Trainer


class CellDisplay(Display):
    """Sends validation losses to the process that started the cell; prints nothing."""

    def __init__(self, title: str, steps: int, notify: Notify) -> None:
        super().__init__(title, steps, Console(file=io.StringIO()))
        self.notify = notify
        self.speed = ""

    def begin(self, step: int, log: MetricsLog) -> None:
        """Say where a continued run begins."""
        if step:
            self.notify(f"continues after step {step:,}")

    def train(self, record: Record) -> None:
        """Remember the speed, and the time that the rest takes at that speed."""
        speed = next(value for key, value in record.items() if key.endswith("_per_second"))
        minutes = (self.steps - record["step"]) * record["seconds"] / record["step"] / 60
        self.speed = f", {speed:,.0f} a second, {minutes:.1f} min left"

    def valid(self, record: Record) -> None:
        """Send the validation loss, the speed and the time left."""
        step = f"step {record['step']:,} of {self.steps:,}"
        self.notify(f"{step}, validation loss {record['loss']:.4f}{self.speed}")


def train_cell(
    trainer: Trainer, folder: Path, notify: Notify, store: CheckpointStore | None = None
) -> MetricsLog:
    """Train to the last step, with figures in the folder's metrics.jsonl.

    With a store, save there, and continue from its latest checkpoint.
    """
    log = trainer.metrics_log(folder)
    with CellDisplay(folder.name, trainer.steps, notify) as display:
        TrainLoop(
            trainer=trainer,
            log=log,
            store=store,
            display=display,
            signals=StopSignals(),  # not entered: the pool ends its worker processes itself
            save_best=False,
        ).run()
    return log


def training_metrics(
    trainer: Trainer, log: MetricsLog, curve: Curve, scales: Sequence[ScaleStatistics]
) -> dict[str, float]:
    """Return cost of training, mean of the validation curve, and distance of M from identity."""
    device = next(trainer.model.parameters()).device
    records = records_of(log.path.parent, "train")
    return {
        "step_ms": step_milliseconds(records, log.unit, trainer.per_step),
        "train_seconds": log.seconds,
        "parameters": float(count_parameters(trainer.model).total),
        **peak_memory(device),
        "valid": curve[-1][1],
        "valid_curve": curve_mean(curve),
        **scale_metrics(scales),
    }


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind in a folder's metrics.jsonl."""
    return [record for record in read_metrics(folder / METRICS) if record["kind"] == kind]


def curve_of(folder: Path, kind: str, name: str) -> Curve:
    """Return one field of these records over the optimizer steps."""
    return [(record["step"], record[name]) for record in records_of(folder, kind)]
