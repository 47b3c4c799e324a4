"""Telling a waiting user how far a long job is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID

# What is being done, how much of it, out of how much; the unit is the caller's (bytes or files).
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """The progress callback of callers that show nothing."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """Yield a callback that draws one bar for each stage on the console."""
    tasks: dict[str, TaskID] = {}
    bars = Bars(console=console)

    def report(stage: str, done: int, total: int) -> None:
        bars.start()  # at the first news: an error before it stays one line
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
