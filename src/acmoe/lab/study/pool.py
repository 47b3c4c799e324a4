"""Run cells in parallel: worker processes share one device, and one process writes the results."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cell_queue import CellQueue, OnEvent, Tally
from acmoe.lab.study.results.records import Record, Results
from acmoe.lab.study.worker import Message, failure, work

# A process that has used CUDA or has threads must not be forked.
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class _Worker:
    process: Any  # a process of the spawn context
    pipe: Connection
    cell: Cell | None = None
    began: float = 0.0

    def start(self, cell: Cell) -> None:
        self.cell, self.began = cell, time.monotonic()
        self.pipe.send(cell)


@dataclass(kw_only=True)
class _Pool:
    jobs: int
    scratch: Path | None
    workers: list[_Worker] = field(default_factory=list)

    def idle(self) -> _Worker | None:
        """Return a worker without a cell, a new one if there are fewer than `jobs`; else None."""
        free = [one for one in self.workers if one.cell is None and one.process.is_alive()]
        if free or len(self.workers) == self.jobs:
            return free[0] if free else None
        ours, theirs = _SPAWN.Pipe()
        arguments = (theirs, threads_per_worker(self.jobs), self.scratch)
        process = _SPAWN.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()  # the pipe then closes when the worker ends
        self.workers.append(_Worker(process, ours))
        return self.workers[-1]

    def busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.cell is not None]

    def messages(self) -> list[tuple[_Worker, Cell, Message]]:
        """Wait for messages; a worker that died counts as a failed cell, with its exit code."""
        by_pipe = {worker.pipe: worker for worker in self.busy()}
        found = []
        for pipe in wait(list(by_pipe)):
            assert isinstance(pipe, Connection)
            worker = by_pipe[pipe]
            assert worker.cell is not None
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                self.drop(worker)
                message = Message("failed", f"its process ended with {worker.process.exitcode}")
            found.append((worker, worker.cell, message))
        return found

    def drop(self, worker: _Worker) -> None:
        worker.pipe.close()
        worker.process.join(timeout=10)
        if worker in self.workers:
            self.workers.remove(worker)

    def end(self) -> None:
        for worker in self.workers:
            worker.process.kill() if worker.cell is not None else worker.pipe.close()
        for worker in self.workers:
            worker.process.join(timeout=30)


def threads_per_worker(jobs: int) -> int | None:
    """Divide the cores between the workers; None where the user has set OMP_NUM_THREADS."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // jobs)


def run_cells(
    cells: Sequence[Cell],
    results: Results,
    *,
    jobs: int = 1,
    scratch: Path | None = None,
    minutes: float | None = None,
    origin: Record | None = None,
    on_event: OnEvent = lambda cell, event, text: None,
) -> Tally:
    """Run the cells in order, `jobs` at a time, and add a record to the results for each.

    With `minutes`, no cell starts that would end later at the pace of its setting, which earlier
    results of the same device tell, or else if it took as long as the longest so far. A cell that
    fails gets a record as failed, and the others go on. Every record contains `origin`.
    """
    queue = CellQueue.of(cells, results, minutes=minutes, origin=origin)
    pool = _Pool(jobs=jobs, scratch=scratch)
    try:
        while queue.waiting or pool.busy():
            while queue.may_start() and (worker := pool.idle()) is not None:
                cell = queue.take()
                on_event(cell, "begun", "")
                worker.start(cell)
            if not pool.busy():
                break  # no cell that waits would end in time
            for worker, cell, message in pool.messages():
                on_event(cell, message.kind, message.text)
                if message.kind == "progress":
                    continue
                record = message.record or failure(cell, message.text)
                queue.add(cell, {**record, **(origin or {})}, began=worker.began)
                worker.cell = None
                if message.kind == "failed":
                    pool.drop(worker)  # a worker ends itself after a failure
    finally:
        pool.end()
    return queue.tally()
