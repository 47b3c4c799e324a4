"""Training progress: a live bar on a terminal, one line per record elsewhere."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from acmoe.train.metrics_log import MetricsLog, Record


class Display:
    """Shows progress on standard error, unless given a console; standard output is for results."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self.title, self.steps = title, steps
        self.console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._valid = ""
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self.console,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, figures="")
        return self

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, step: int, log: MetricsLog) -> None:
        """Announce that training starts after `step`, which an earlier call reached."""
        board = f" and {log.board.folder}" if log.board.available else ""
        again = f", continuing after step {step}" if step else ""
        self.say(f"{self.title}: {self.steps} steps{again}; figures go to {log.path}{board}")
        self._advance(step, "")

    def train(self, record: Record) -> None:
        """Show a training record."""
        balance = record["load_balance"]
        unit = next(name for name in ("tokens", "images") if f"{name}_per_second" in record)
        figures = f"loss {record['loss']:.4f}  {record[f'{unit}_per_second']:,.0f} {unit}/s"
        if balance:
            figures += f"  load balance {sum(balance) / len(balance):.1f}"
        self._advance(record["step"], figures + self._valid)
        if self._bar is None:
            left = record["seconds"] / record["step"] * (self.steps - record["step"])
            self._line(record, f"{figures}  {left:.0f} s left")

    def valid(self, record: Record) -> None:
        """Show a validation record."""
        name = next(key for key in ("bits_per_byte", "perplexity", "top1") if key in record)
        self._valid = f"  valid {record[name]:.4f}"
        averaged = record.get(f"ema_{name}")
        ema = "" if averaged is None else f", of averaged weights {averaged:.4f}"
        self._line(record, f"validation {name.replace('_', ' ')} {record[name]:.4f}{ema}")

    def _line(self, record: Record, figures: str) -> None:
        self.say(f"{self.title}: step {record['step']}/{self.steps}  {figures}")

    def _advance(self, step: int, figures: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
