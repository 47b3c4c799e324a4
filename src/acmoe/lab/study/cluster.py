"""Run cells on the nodes of a cluster: a task for each cell, and one process writes the results.

This file knows no cluster software: `Cluster` is what it needs, `ray_cluster.py` does it with Ray.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cell_queue import CellQueue, OnEvent, Tally
from acmoe.lab.study.results.records import Record, Results
from acmoe.lab.study.worker import failure

RETRIES = 3  # times that a cell is started again after its process or its node was lost


class Lost(NamedTuple):
    """The result of a task whose process or node died before it could return a record."""

    reason: str


class Cluster(Protocol):
    """The nodes that run cells. A started cell is known by its digest until it has ended."""

    def capacity(self) -> int:
        """Return the number of cells that the nodes can run at once, now."""
        ...

    def start(self, cell: Cell) -> None:
        """Start a cell on some node."""
        ...

    def ended(self) -> list[tuple[str, Record | Lost]]:
        """Wait for some seconds; return the cells that have ended, by digest."""
        ...


@dataclass
class _Started:
    cell: Cell
    began: float
    losses: int = 0  # times that its process or its node was lost

    def lost_for_good(self, reason: str) -> Record:
        """Return the record of a cell that is not started again."""
        return failure(self.cell, f"lost {RETRIES + 1} times: {reason}")


def run_on_cluster(
    cells: Sequence[Cell],
    results: Results,
    cluster: Cluster,
    *,
    minutes: float | None = None,
    origin: Record | None = None,
    on_event: OnEvent = lambda cell, event, text: None,
) -> Tally:
    """Run the cells in order, and add a record to the results for each, as `pool.run_cells` does.

    A cell whose process or node is lost is started again, up to RETRIES times; it continues from
    its checkpoint where it saves one. A cell that raises gets a record as failed at once. Fields
    that a record lacks are taken from `origin`.
    """
    queue = CellQueue.of(cells, results, minutes=minutes, origin=origin)
    running: dict[str, _Started] = {}
    while queue.waiting or running:
        room = max(1, cluster.capacity()) - len(running)
        while room > 0 and queue.may_start():
            cell, room = queue.take(), room - 1
            on_event(cell, "begun", "")
            running[cell.digest] = _Started(cell, time.monotonic())
            cluster.start(cell)
        if not running:
            break  # no cell that waits would end in time
        for digest, ended in cluster.ended():
            one = running[digest]
            if isinstance(ended, Lost) and one.losses < RETRIES:
                one.losses += 1
                again = f"starts again ({one.losses} of {RETRIES} times): {ended.reason}"
                on_event(one.cell, "progress", again)
                cluster.start(one.cell)
                continue
            record = one.lost_for_good(ended.reason) if isinstance(ended, Lost) else ended
            queue.add(one.cell, {**(origin or {}), **record}, began=one.began)
            del running[digest]
            on_event(one.cell, str(record["status"]), str(record.get("error", "")))
    return queue.tally()
