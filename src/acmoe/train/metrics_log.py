"""metrics.jsonl: the figures of a run, one complete record per line, each step only once."""

import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from acmoe.evaluate.language_report import Metric, value_of
from acmoe.evaluate.measures import load_balance
from acmoe.evaluate.run import METRICS, is_metric, missing_records
from acmoe.storage.atomic import damaged_name, replace_text, report_write_errors, sync
from acmoe.storage.lines import append_line, line_of, read_lines
from acmoe.train.update import Update

Record = dict[str, Any]


class Score(Protocol):
    """A score of the validation split: a NamedTuple with the settings it depends on."""

    @property
    def loss(self) -> float: ...
    def _asdict(self) -> dict[str, Any]: ...


class MetricsLog:
    """Writes metrics.jsonl; holds the losses since the last line and the best validation score.

    Losses stay on the device until `read_losses` reads all of them at once. The clock counts
    training time only: validation, saving and the time between two calls of `train` are left out.
    """

    unit = "tokens"  # unit of the training speed
    ranked: tuple[str, ...] = ("loss",)  # fields of a score that `rank` reads
    writes = True  # False: another process of the run writes the file

    def __init__(self, folder: Path, metric: str) -> None:
        self.path, self.metric = folder / METRICS, metric
        self.losses: list[float] = []
        self.aux_losses: list[float] = []
        self.best: dict[str, Any] | None = None
        self.seconds = 0.0
        self.records: int | None = None  # written by all calls together; None: not known
        self._unread: list[Tensor] = []
        self._units, self._since = 0, 0.0  # units since the last line, and `seconds` at that line
        self._mark = time.perf_counter()
        self.board = Board(folder / "tensorboard")

    def open(self, step: int) -> str | None:
        """Start after `step`; drop later records, whose steps will be trained again.

        Returns one line about records that could not be read, or None.
        """
        complaint = None
        if self.writes:
            kept, complaint = drop_records_after(self.path, step, self.records)
            self.records = kept if self.records is None else self.records
            self.board.open(step)
        self._since, self._mark = self.seconds, time.perf_counter()
        return complaint

    def close(self) -> None:
        """Release what `open` opened."""
        self.board.close()

    def sync(self) -> None:
        """Flush the records to disk, so that no checkpoint is newer than they are."""
        if self.path.is_file():
            with report_write_errors(self.path):
                sync(self.path)

    def state_dict(self) -> Record:
        """Return what a resumed run needs."""
        names = ("seconds", "losses", "aux_losses", "best", "records")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; raise where a number is something else."""
        best, records = state["best"], state.get("records")  # the second is absent in version 0.1
        ranked = [best[name] for name in ("step", *self.ranked)] if best is not None else []
        count = [records] if records is not None else []
        numbers = [state["seconds"], *count, *ranked, *state["losses"], *state["aux_losses"]]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a number is not finite")
        self.seconds, self.best = state["seconds"], state["best"]
        self.losses, self.aux_losses = state["losses"], state["aux_losses"]
        self.records = records

    def add(self, update: Update, units: int) -> None:
        """Add an update over `units` tokens, or images."""
        self._unread.append(torch.stack([update.loss, update.aux_loss, update.finite.float()]))
        self._units += units

    def read_losses(self) -> int | None:
        """Read the losses added since the last call; return the index of the first bad one."""
        rows = torch.stack(self._unread).tolist()
        self._unread.clear()
        self.losses += [loss for loss, _, _ in rows]
        self.aux_losses += [aux_loss for _, aux_loss, _ in rows]
        finite = [flag == 1 for _, _, flag in rows]
        return None if all(finite) else finite.index(False)

    def train_record(self, step: int, lr: float, loads: Sequence[Tensor]) -> Record:
        """Write a record of the steps since the last one; call `read_losses` first."""
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

    def valid_record(self, step: int, score: Score) -> Record:
        """Write a record of a validation, and remember the score if it is the best so far."""
        rank = self.rank(score._asdict())
        # A score that is not a number is never the best.
        if all(map(math.isfinite, rank)) and (self.best is None or rank < self.rank(self.best)):
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
        """Return a sort key: the best score has the smallest."""
        return (score["loss"],)

    def figures(self, loss: float) -> Record:
        """Return figures that follow from a loss, such as the perplexity."""
        return {self.metric.replace(" ", "_"): value_of(loss, cast(Metric, self.metric))}

    @property
    def best_step(self) -> int | None:
        """The step of the best validation so far."""
        return None if self.best is None else self.best["step"]

    @property
    def best_value(self) -> float | None:
        """The best validation score so far, in units of the metric."""
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
        if self.writes:
            append_line(self.path, record)
            self.records = (self.records or 0) + 1
            self.board.write(record)
        return record


class ImageMetricsLog(MetricsLog):
    """Metrics of an image classifier; the best score has the highest accuracy, then lowest loss."""

    unit = "images"
    ranked = ("loss", "top1")

    def rank(self, score: Mapping[str, Any]) -> tuple[float, ...]:
        """Sort by accuracy, then by loss."""
        return (-score["top1"], score["loss"])

    def figures(self, loss: float) -> Record:
        """Return nothing: no figure follows from a loss of mixed images and smoothed labels."""
        return {}

    @property
    def best_value(self) -> float | None:
        """The best top-1 accuracy so far, in percent."""
        return None if self.best is None else self.best["top1"]


class Board:
    """Writes the same figures for TensorBoard, where that package is installed."""

    available = find_spec("tensorboard") is not None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def open(self, step: int) -> None:
        """Start writing after `step`."""
        if self.available:
            from torch.utils.tensorboard import SummaryWriter

            # Events after `step` come from a killed process; their steps will be trained again.
            with report_write_errors(self.folder):
                self._writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def close(self) -> None:
        """End the thread and the file of the writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with report_write_errors(self.folder):
                writer.close()

    def write(self, record: Record) -> None:
        """Write every number of a record."""
        if self._writer is None:
            return
        with report_write_errors(self.folder):
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
            self._writer.flush()


def drop_records_after(
    path: Path, step: int, expected: int | None = None
) -> tuple[int, str | None]:
    """Remove the records after `step` from a file.

    Returns the number of records that stay, and one line that describes damage, or None.

    expected: the number of records up to `step`, where it is known.
    A file with damaged lines is kept beside the new one as metrics.jsonl.damaged-1, -2, ...
    """
    lines = read_lines(path)
    kept = [record for record in lines.records if is_metric(record) and record["step"] <= step]
    strange = sum(not is_metric(record) for record in lines.records)
    complaint = lines.complaint(path)
    if missing := missing_records(path, kept, step, expected):
        complaint = f"{complaint}; {missing}" if complaint else missing
    if strange:
        complaint = f"{complaint or path}; {strange} lines are JSON but no records of a run"
    if lines.damaged or strange:
        copy = damaged_name(path)
        with report_write_errors(copy):
            shutil.copyfile(path, copy)
        complaint = f"{complaint}; the file as it was is {copy}"
    replace_text(path, b"".join(map(line_of, kept)).decode())
    return len(kept), complaint
