"""Progress for a person: what runs now and how far; a line for each end where nobody watches."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from acmoe.lab.study.cell import Cell


class Watch:
    """Called with what happens to each cell; see `acmoe.lab.study.pool.Watcher`."""

    def __init__(self, title: str, total: int, done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.fields[news]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._all = self._bars.add_task(title, total=total, completed=done, news="")
        self._running: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __call__(self, cell: Cell, event: str, text: str) -> None:
        if event == "begun":
            self._running[cell.digest] = self._bars.add_task(cell.name, total=None, news="")
        elif event == "news":
            self._bars.update(self._running[cell.digest], news=text)
        else:
            self._bars.remove_task(self._running.pop(cell.digest))
            self._bars.advance(self._all)
            said = f"{cell.name}: {event}" + (f": {text}" if text else "")
            self.console.print(said, highlight=False, markup=False, soft_wrap=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bars.stop()
