"""The function that a Ray worker process runs: one cell, in its folder."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import acmoe
from acmoe.errors import UserError, check
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cells.folder import saves
from acmoe.lab.study.environment import study_environment
from acmoe.lab.study.progress import QUIET
from acmoe.lab.study.results.records import Record
from acmoe.lab.study.worker import failure, one_line, run_cell
from acmoe.storage.lock import locked

# Seconds to wait for the folder of a cell: the processes of a driver that was killed end later
# than it does, and a file server keeps the locks of a dead node for up to 90 s.
PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings that all tasks of a study share."""

    jobs: int  # cells that share a device
    device: str
    scratch: Path | None
    commit: str | None = None  # the driver's; a worker's copy of the package may have no history
    version: str = acmoe.__version__


def run_task(cell: Cell, job: Job) -> Record:
    """Run a cell and return its record, with the environment of this node."""
    try:
        check(
            job.version == acmoe.__version__,
            f"the node has acmoe {acmoe.__version__}, the driver {job.version}; install the same",
        )
        with cell_lock(cell, job.scratch):
            record = run_cell(cell, job.scratch, Notifier(cell.name))
    except Exception as error:
        record = failure(cell, one_line(error))
    here = study_environment(job.device, jobs=job.jobs)
    return {**record, "environment": {**here, "commit": job.commit or here["commit"]}}


class Notifier:
    """Prints progress of a cell every QUIET seconds; Ray shows the lines to the driver."""

    def __init__(self, name: str) -> None:
        self.name, self.last = name, 0.0

    def __call__(self, text: str) -> None:
        if time.monotonic() - self.last > QUIET:
            self.last = time.monotonic()
            print(f"{self.name}: {text}", flush=True)


@contextmanager
def cell_lock(cell: Cell, scratch: Path | None, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the folder of a cell that saves checkpoints; wait until another process has left it."""
    if scratch is None or not saves(cell.config):
        yield
        return
    path = scratch / f".acmoe-study-{cell.digest}.lock"
    with ExitStack() as held:
        deadline = time.monotonic() + patience
        while not _take(path, held, last=time.monotonic() > deadline):
            time.sleep(0.2)
        yield
        path.unlink(missing_ok=True)


def _take(path: Path, held: ExitStack, *, last: bool) -> bool:
    """Try to take the lock; where another process has it, return False, or raise if `last`."""
    in_use = f"{path} is held by process {{owner}}, which runs this cell; end that process"
    try:
        held.enter_context(locked(path, in_use=in_use))
    except UserError:
        if last:
            raise
        return False
    return True
