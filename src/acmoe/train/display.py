"""Training progress: a live bar on a terminal, one line per record elsewhere."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from acmoe.data.progress import ProgressLines
from acmoe.train.metrics_log import MetricsLog, Record


class Screen:
    """A console that shows any number of bars, of several runs at once."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal  # bars are drawn; else there are lines only
        self._tasks: dict[str, TaskID] = {}
        self._lines = ProgressLines(self.console)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=not self.live,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.live and self._tasks:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, title: str, done: int, total: int, figures: str = "") -> None:
        """Move the bar of that title, with figures beside it."""
        self._bars.start()  # only now, so that an earlier error prints as a single line
        if title not in self._tasks:
            self._tasks[title] = self._bars.add_task(title, total=total, figures=figures)
        self._bars.update(self._tasks[title], completed=done, total=total, figures=figures)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show the progress of something other than training; a callback of type `Progress`."""
        if self.live:
            self.advance(stage, done, total)
        else:
            self._lines(stage, done, total)


class Display:
    """Shows a run on standard error, unless given a console; standard output is for results.

    `note` is a line that `begin` prints.
    """

    def __init__(
        self, title: str, steps: int, console: Console | None = None, *, note: str = ""
    ) -> None:
        self.title, self.steps, self.note = title, steps, note
        self.screen = Screen(console)
        self._valid = ""

    def __enter__(self) -> Self:
        self.screen.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.screen.__exit__(*raised)

    def say(self, text: str) -> None:
        """Print a line."""
        self.screen.say(text)

    def begin(self, step: int, log: MetricsLog) -> None:
        """Announce that training starts after `step`, which an earlier call reached."""
        board = f" and {log.board.folder}" if log.board.available else ""
        again = f", continuing after step {step}" if step else ""
        self.say(f"{self.title}: {self.steps} steps{again}; figures go to {log.path}{board}")
        if self.note:
            self.say(f"{self.title}: {self.note}")
        self._advance(step, "")

    def train(self, record: Record) -> None:
        """Show a training record."""
        balance = record["load_balance"]
        unit = next(name for name in ("tokens", "images") if f"{name}_per_second" in record)
        speed = f"{record[f'{unit}_per_second']:,.0f} {unit}/s"
        figures = f"loss {record['loss']:.4f} nats  {speed}"
        if balance:
            std = sum(balance) / len(balance)
            figures += f"  load std {std:.1f} points{'' if self.screen.live else ' (0 is even)'}"
        self._advance(record["step"], figures + self._valid)
        if not self.screen.live:
            left = record["seconds"] / record["step"] * (self.steps - record["step"])
            self._line(record, f"{figures}  {left:.0f} s left")

    def valid(self, record: Record) -> None:
        """Show a validation record."""
        name = next(key for key in ("bits_per_byte", "perplexity", "top1") if key in record)
        label, unit = UNITS[name]
        self._valid = f"  valid {record[name]:.4f}{unit}"
        averaged = record.get(f"ema_{name}")
        ema = "" if averaged is None else f", of averaged weights {averaged:.4f}{unit}"
        self._line(record, f"validation {label}{record[name]:.4f}{unit}{ema}")

    def _line(self, record: Record, figures: str) -> None:
        self.say(f"{self.title}: step {record['step']}/{self.steps}  {figures}")

    def _advance(self, step: int, figures: str) -> None:
        self.screen.advance(self.title, step, self.steps, figures)


# Field of a validation record -> its name before the number, and the unit after it.
UNITS = {
    "bits_per_byte": ("", " bits per byte"),
    "perplexity": ("perplexity ", ""),
    "top1": ("top-1 accuracy ", " %"),
}
