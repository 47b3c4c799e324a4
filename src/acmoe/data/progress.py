"""Progress reports of long jobs: bars on a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID

# Called with the stage, the amount done and the total. The caller chooses the unit: bytes, files.
Progress = Callable[[str, int, int], None]

FIRST_LINE, NEXT_LINE = 3.0, 10.0  # seconds until the first line of a stage, and between lines


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """Yield a callback that shows one bar per stage, or lines where the console is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        yield ProgressLines(console)
        return
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


class ProgressLines:
    """A progress callback that prints a line after 3 seconds of a stage, then every 10 seconds.

    A stage that takes less than 3 seconds prints nothing. A stage whose amount falls begins again.
    Lines name the time left once the speed of the stage is known.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self._began: dict[str, tuple[float, int]] = {}  # by stage: time and amount at first call
        self._due: dict[str, float] = {}
        self._done: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self.clock()
        if done < self._done.get(stage, 0):
            del self._began[stage], self._due[stage]
        self._done[stage] = done
        began, first = self._began.setdefault(stage, (now, done))
        if now < self._due.setdefault(stage, now + FIRST_LINE):
            return
        self._due[stage] = now + NEXT_LINE
        left = (now - began) / (done - first) * (total - done) if done > first else None
        self.console.print(
            f"{stage}: {done:,} of {total:,}{'' if left is None else f', {left:.0f} s left'}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
