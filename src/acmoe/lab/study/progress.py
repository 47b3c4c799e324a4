"""Progress of a study: live bars on a terminal, lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from acmoe.lab.study.cell import Cell

QUIET = 15.0  # least seconds between two lines about the same unfinished cell


class StudyProgress:
    """Shows the events of `run_cells`; see `acmoe.lab.study.pool.OnEvent`."""

    def __init__(self, title: str, total: int, done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._all = self._bars.add_task(title, total=total, completed=done, status="")
        self._running: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}  # when a line about the cell was last printed

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __call__(self, cell: Cell, event: str, text: str) -> None:
        """Show an event of a cell."""
        if event == "begun":
            self._running[cell.digest] = self._bars.add_task(cell.name, total=None, status="")
            self._told[cell.digest] = time.monotonic()
        elif event == "progress":
            self._bars.update(self._running[cell.digest], status=text)
            if not self.console.is_terminal and time.monotonic() - self._told[cell.digest] > QUIET:
                self._told[cell.digest] = time.monotonic()
                self._say(f"{cell.name}: {text}")
        else:
            self._bars.remove_task(self._running.pop(cell.digest))
            self._bars.advance(self._all)
            self._say(f"{cell.name}: {event}" + (f": {text}" if text else ""))

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()
