"""One process of a study: takes a cell, runs it, tells how it ended, takes the next."""

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.text.train import RunConfig
from acmoe.errors import UserError, check
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.image_cell import run_images
from acmoe.lab.study.outcome import News, Outcome
from acmoe.lab.study.results import DONE, FAILED
from acmoe.lab.study.synthetic import SyntheticConfig
from acmoe.lab.study.synthetic_cell import run_synthetic_cell
from acmoe.lab.study.text_cell import run_text
from acmoe.runtime import pick_device

Runner = Callable[[Cell, Path, News], Outcome]

# What trains and scores a cell, by the type of its config.
RUNNERS: dict[type[Any], Runner] = {
    RunConfig: run_text,
    VisionRunConfig: run_images,
    SyntheticConfig: run_synthetic_cell,
}


@dataclass(frozen=True)
class Message:
    """From a worker: news on the way, or the end of its cell."""

    kind: Literal["news", "done", "failed"]
    text: str = ""
    record: dict[str, Any] | None = None


def runner_of(config: object) -> Runner:
    found = [run for kind, run in RUNNERS.items() if isinstance(config, kind)]
    check(bool(found), f"no runner for a {type(config).__name__}; add one to study.worker.RUNNERS")
    return found[0]


def run_cell(cell: Cell, scratch: Path | None, news: News) -> dict[str, Any]:
    """The record of a cell that was run to its end; its folder is thrown away."""
    device = pick_device(getattr(cell.config, "device", "auto"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="acmoe-study-", dir=scratch) as folder:
        outcome = runner_of(cell.config)(cell, Path(folder), news)
    return {
        **cell.to_json(),
        "digest": cell.digest,
        "status": DONE,
        "metrics": {**outcome.metrics, "seconds": time.perf_counter() - started},
        "curves": dict(outcome.curves),
        "details": dict(outcome.details),
    }


def failure(cell: Cell, error: str) -> dict[str, Any]:
    return {**cell.to_json(), "digest": cell.digest, "status": FAILED, "error": error}


def work(pipe: Connection, threads: int | None, scratch: Path | None) -> None:
    """Run the cells that come through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to act on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if threads is not None:
        torch.set_num_threads(threads)
    while True:
        try:
            cell: Cell = pipe.recv()
        except EOFError:
            return
        try:
            record = run_cell(cell, scratch, lambda text: pipe.send(Message("news", text)))
        except Exception as error:
            # A broken CUDA context would fail every cell after this one: leave them to another.
            pipe.send(Message("failed", _one_line(error)))
            return
        pipe.send(Message("done", record=record))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the processes beside us


def _one_line(error: Exception) -> str:
    """A user's error is one already, such as a loss that is not finite; others are traced."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
