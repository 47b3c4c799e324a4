"""Choose the number of CPU threads of a command by the size of its model.

OpenMP's threads wait for each other after every op, and spin while they wait. The ops of a small
model take less time than a thread needs to be scheduled on a busy machine. switch-nano (370,976
parameters) trains at 5,700 tokens/s with two threads on two idle cores and at 260 when two other
processes are busy; with one thread it trains at 4,400 on idle cores.

The library itself never changes torch's number; only commands call `use_threads`.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acmoe.errors import UserError, check
from acmoe.evaluate.run import CHECKPOINTS, STATE, checkpoints, read_json
from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model
from acmoe.runtime import pick_device

SMALL = 2_000_000  # parameters; the nano models have up to 0.9 million, all others 36 or more


class Threads(NamedTuple):
    """A number of CPU threads; None leaves torch's own."""

    count: int | None
    reason: str

    @property
    def message(self) -> str:
        """One line for the log."""
        count = torch.get_num_threads() if self.count is None else self.count
        return f"{count} CPU thread{'' if count == 1 else 's'}: {self.reason}"


def choose_threads(
    requested: int | None, model: Any, *, device: str = "auto", run: Path | None = None
) -> Threads:
    """Choose the threads of a command that runs the model of config `model`.

    In order: the number requested; OMP_NUM_THREADS, which torch has read; the number that the run
    in the folder `run` was saved with, so that its bits repeat; one for a small model on a CPU.
    """
    if requested is not None:
        check(requested >= 1, f"--threads {requested}; it must be at least 1")
        return Threads(requested, "--threads")
    if "OMP_NUM_THREADS" in os.environ:
        return Threads(None, "OMP_NUM_THREADS")
    saved = None if run is None else saved_threads(run)
    if saved is not None:
        return Threads(saved, "as the run was begun, so that its bits repeat; --threads N sets it")
    if pick_device(device).type != "cpu":
        return Threads(None, "torch's default; the model is on a GPU")
    parameters = count_model(model)
    if parameters < SMALL:
        return Threads(1, f"enough for {parameters:,} parameters; --threads N sets it")
    return Threads(None, f"torch's default, for {parameters:,} parameters; --threads N sets it")


def use_threads(threads: Threads) -> None:
    """Set torch's number of threads for the whole process."""
    if threads.count is not None and threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)


def saved_threads(run: Path) -> int | None:
    """Return the threads that the run's latest checkpoint was saved with; None if not known."""
    found = checkpoints(run / CHECKPOINTS)
    try:
        saved = read_json(found[-1] / STATE).get("threads") if found else None
    except UserError:
        return None  # resuming reports the damage
    return saved if type(saved) is int and saved >= 1 else None


def threads_note(state: dict[str, Any]) -> str | None:
    """Return a line where a checkpoint's state was saved with another number of threads."""
    before, now = state.get("threads"), torch.get_num_threads()
    if before in (None, now):
        return None
    return (
        f"the run was saved with {before} threads and goes on with {now}: sums are rounded "
        f"differently, so bits will differ; OMP_NUM_THREADS={before} repeats them"
    )


def count_model(model: Any) -> int:
    """Return the number of parameters of a model config, without allocating them."""
    with torch.device("meta"):
        return count_parameters(build_model(model)).total
