"""A worker process of a study: receives cells, runs them one by one, and sends the results."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.text.train import RunConfig
from acmoe.errors import NonFiniteError, UserError, check
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.cells.folder import cell_folder
from acmoe.lab.study.cells.images import run_images
from acmoe.lab.study.cells.outcome import Notify, Outcome
from acmoe.lab.study.cells.text import run_text
from acmoe.lab.study.results.records import DONE, FAILED
from acmoe.lab.study.synthetic.cells import run_synthetic_cell
from acmoe.lab.study.synthetic.task import SyntheticConfig
from acmoe.runtime import pick_device
from acmoe.train.freed_memory import keep_freed_memory

Runner = Callable[[Cell, Path, Notify], Outcome]

# The function that trains and scores a cell, by the type of its config.
RUNNERS: dict[type[Any], Runner] = {
    RunConfig: run_text,
    VisionRunConfig: run_images,
    SyntheticConfig: run_synthetic_cell,
}


@dataclass(frozen=True)
class Message:
    """A message from a worker: progress of its cell, or how the cell ended."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    record: dict[str, Any] | None = None


def runner_of(config: object) -> Runner:
    """Return the runner for a config."""
    found = [run for kind, run in RUNNERS.items() if isinstance(config, kind)]
    check(bool(found), f"no runner for a {type(config).__name__}; add one to study.worker.RUNNERS")
    return found[0]


def run_cell(cell: Cell, scratch: Path | None, notify: Notify) -> dict[str, Any]:
    """Run a cell in its folder, which is removed afterwards, and return its record."""
    device = pick_device(getattr(cell.config, "device", "auto"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    with cell_folder(cell, scratch) as folder:
        outcome = runner_of(cell.config)(cell, folder, notify)
        check_metrics(outcome)
    return {
        **cell.to_json(),
        "digest": cell.digest,
        "status": DONE,
        "metrics": {**outcome.metrics, "seconds": time.perf_counter() - started},
        "curves": dict(outcome.curves),
        "details": dict(outcome.details),
    }


def check_metrics(outcome: Outcome) -> None:
    """Refuse an outcome with a metric that is NaN or infinite: it must not enter the results."""
    bad = [f"{name}={value}" for name, value in outcome.metrics.items() if not isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"the cell's {', '.join(bad[:3])} is not finite, so it has no figures to compare; try "
            "a lower lr, or clip=1.0"
        )


def failure(cell: Cell, error: str) -> dict[str, Any]:
    """Return the record of a cell that failed."""
    return {**cell.to_json(), "digest": cell.digest, "status": FAILED, "error": error}


def work(pipe: Connection, threads: int | None, scratch: Path | None) -> None:
    """Run the cells that arrive through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    while True:
        try:
            cell: Cell = pipe.recv()
        except EOFError:
            return
        try:
            record = run_cell(cell, scratch, lambda text: pipe.send(Message("progress", text)))
        except Exception as error:
            # A broken CUDA context would fail every later cell, so this worker ends.
            pipe.send(Message("failed", one_line(error)))
            return
        pipe.send(Message("done", record=record))
        # The next cell compiles another model; old graphs would count towards Dynamo's limit.
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # leave the memory to the other workers


def one_line(error: Exception) -> str:
    """Return the error in one line; print the traceback unless it is a user's mistake."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _end_with_parent() -> None:
    """Exit when the parent exits; a parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
