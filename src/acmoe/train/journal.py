"""metrics.jsonl: what a run measured, one whole record a line, and nothing twice."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from acmoe.evaluate.language import Metric, value_of
from acmoe.evaluate.measures import load_balance
from acmoe.evaluate.run import METRICS, read_metrics
from acmoe.train.checkpoint import write_text
from acmoe.train.update import Update

Record = dict[str, Any]


class Scored(Protocol):
    """A score of the validation split, a NamedTuple with what it depends on."""

    @property
    def loss(self) -> float: ...
    def _asdict(self) -> dict[str, Any]: ...


class Journal:
    """Losses since the last line, the clock, and the best validation so far.

    Losses stay on the device until `look` reads all of them at once. The clock counts training
    alone: not validation, not saving, not the time between two calls of `train`.
    """

    unit = "tokens"  # that the speed counts
    ranked: tuple[str, ...] = ("loss",)  # what the best checkpoint is chosen by

    def __init__(self, folder: Path, metric: str) -> None:
        self.path, self.metric = folder / METRICS, metric
        self.losses: list[float] = []
        self.aux_losses: list[float] = []
        self.best: dict[str, Any] | None = None
        self.seconds = 0.0
        self._unread: list[Tensor] = []
        self._units, self._since = 0, 0.0  # since the last line: units, and `seconds` then
        self._mark = time.perf_counter()
        self.board = Board(folder / "tensorboard")

    def open(self, step: int) -> None:
        """Begin behind `step`: what a killed process wrote beyond it will be written again."""
        forget_after(self.path, step)
        self._since, self._mark = self.seconds, time.perf_counter()
        self.board.open(step)

    def state_dict(self) -> Record:
        """What a run that continues goes on with."""
        names = ("seconds", "losses", "aux_losses", "best")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds, self.best = state["seconds"], state["best"]
        self.losses, self.aux_losses = state["losses"], state["aux_losses"]

    def note(self, update: Update, tokens: int) -> None:
        """An update of so many tokens, or images."""
        self._unread.append(torch.stack([update.loss, update.aux_loss, update.sound.float()]))
        self._units += tokens

    def look(self) -> int | None:
        """Read the losses; the place of the first unsound update among those just read."""
        rows = torch.stack(self._unread).tolist()
        self._unread.clear()
        self.losses += [loss for loss, _, _ in rows]
        self.aux_losses += [aux_loss for _, aux_loss, _ in rows]
        sound = [flag == 1 for _, _, flag in rows]
        return None if all(sound) else sound.index(False)

    def train_record(self, step: int, lr: float, loads: Sequence[Tensor]) -> Record:
        """A line on the steps since the last one; call `look` before."""
        self._tick()
        loss = math.fsum(self.losses) / len(self.losses)
        passed = self.seconds - self._since
        record = {
            "kind": "train",
            "step": step,
            "loss": loss,
            **self.figures(loss),
            "aux_loss": math.fsum(self.aux_losses) / len(self.aux_losses),
            "lr": lr,
            f"{self.unit}_per_second": self._units / max(passed, 1e-9),
            "load_balance": [load_balance(load) for load in loads],
            "seconds": self.seconds,
        }
        self.losses, self.aux_losses = [], []
        self._units, self._since = 0, self.seconds
        return self._write(record)

    def valid_record(self, step: int, score: Scored) -> Record:
        """A line on the validation split; also remembers the best."""
        if self.best is None or self.rank(score._asdict()) < self.rank(self.best):
            self.best = {"step": step, **{name: score._asdict()[name] for name in self.ranked}}
        record = {
            "kind": "valid",
            "step": step,
            "loss": score.loss,
            **self.figures(score.loss),
            **{name: value for name, value in score._asdict().items() if name != "loss"},
            "seconds": self.seconds,
        }
        return self._write(record)

    def rank(self, score: Mapping[str, Any]) -> tuple[float, ...]:
        """Less is better."""
        return (score["loss"],)

    def figures(self, loss: float) -> Record:
        """What else a loss says."""
        return {self.metric.replace(" ", "_"): value_of(loss, cast(Metric, self.metric))}

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else self.best["step"]

    @property
    def best_value(self) -> float | None:
        """In units of the metric."""
        return None if self.best is None else value_of(self.best["loss"], cast(Metric, self.metric))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside `with`."""
        self._tick()
        try:
            yield
        finally:
            self._mark = time.perf_counter()

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds, self._mark = self.seconds + now - self._mark, now

    def _write(self, record: Record) -> Record:
        append(self.path, record)
        self.board.write(record)
        return record


class Board:
    """The same figures for TensorBoard, where that package is installed."""

    available = find_spec("tensorboard") is not None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def open(self, step: int) -> None:
        if self.available:
            from torch.utils.tensorboard import SummaryWriter

            # Events beyond the step belong to a run that was killed and will come again.
            self._writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def write(self, record: Record) -> None:
        if self._writer is None:
            return
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._writer.flush()


def append(path: Path, record: Record) -> None:
    """Add a line; a crash can only cut off the last one, which `read_metrics` leaves out."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def forget_after(path: Path, step: int) -> None:
    """Drop the records beyond a step, and a line cut off by a crash."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
