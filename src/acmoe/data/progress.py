"""Progress reports of long jobs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID

# Called with the stage, the amount done and the total. The caller chooses the unit: bytes, files.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """Yield a callback that draws one progress bar per stage on the console."""
    tasks: dict[str, TaskID] = {}
    bars = Bars(console=console)

    def report(stage: str, done: int, total: int) -> None:
        bars.start()  # only now, so that an earlier error prints as a single line
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
