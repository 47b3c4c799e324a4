"""The cells of a study that wait to be run, and the records of those that have ended.

`pool.py` runs them on this machine, `cluster.py` on the nodes of a cluster.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.pace import Pace, end_of, known_paces
from acmoe.lab.study.results.records import DONE, Record, Results

# Called with a cell, its event (begun, progress, done or failed), and a progress line or an error.
OnEvent = Callable[[Cell, str, str], None]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of the cells of a call of `run_cells` or `run_on_cluster`, by how they ended."""

    done: int
    failed: int
    left: int  # cells that were not started because the time ran out


@dataclass
class CellQueue:
    """Gives out cells in order while the time lasts, and adds their records to the results."""

    waiting: deque[Cell]
    results: Results
    pace: Pace
    done: int = 0
    failed: int = 0

    @classmethod
    def of(
        cls,
        cells: Sequence[Cell],
        results: Results,
        *,
        minutes: float | None,
        origin: Record | None,
    ) -> "CellQueue":
        """Return the queue of these cells; earlier results of the same `origin` tell the pace."""
        pace = Pace(ends=end_of(minutes), paces=known_paces(results.records, origin or {}))
        return cls(deque(cells), results, pace)

    def may_start(self) -> bool:
        """Return True if a cell waits and the next one is expected to end in time."""
        return bool(self.waiting) and self.pace.fits(self.waiting[0])

    def take(self) -> Cell:
        """Remove the next cell from the queue and return it."""
        return self.waiting.popleft()

    def add(self, cell: Cell, record: Record, *, began: float) -> None:
        """Add the record of a cell that began at this time (`time.monotonic`) and has ended."""
        self.results.add(record)
        if record["status"] == DONE:
            self.done += 1
        else:
            self.failed += 1
        self.pace.took(cell, time.monotonic() - began)

    def tally(self) -> Tally:
        """Return how the cells ended so far."""
        return Tally(done=self.done, failed=self.failed, left=len(self.waiting))
