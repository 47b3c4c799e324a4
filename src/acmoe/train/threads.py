"""Choose how a command uses the CPU, by the size of its model: threads, and oneDNN on ARM.

OpenMP's threads wait for each other after every op, and spin while they wait. The ops of a small
model take less time than a thread needs to be scheduled on a busy machine. switch-nano (370,976
parameters) trains at 5,700 tokens/s with two threads on two idle cores and at 260 when two other
processes are busy; with one thread it trains at 4,400 on idle cores.

On ARM, torch gives small float32 products to oneDNN, which takes longer than BLAS: a step of
switch-nano-acmoe takes 0.41 s of CPU time with oneDNN and 0.19 s without (torch 2.13, Linux).

The library itself never changes torch's settings; only commands call `use_threads`.
"""

import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from acmoe.errors import UserError, check
from acmoe.evaluate.run import CHECKPOINTS, STATE, checkpoints, read_json
from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model
from acmoe.runtime import pick_device

MOST = 4096  # threads; OpenMP ends the process where it cannot start as many
SMALL = 2_000_000  # parameters; the nano models have up to 0.9 million, all others 36 or more


class Threads(NamedTuple):
    """A number of CPU threads, and whether to use oneDNN; None leaves torch's own setting."""

    number: int | None
    reason: str
    onednn: bool | None = None

    @property
    def message(self) -> str:
        """One line for the log."""
        count = torch.get_num_threads() if self.number is None else self.number
        without = ", oneDNN off (slower for small models on ARM)" if self.onednn is False else ""
        return f"{count} CPU thread{'' if count == 1 else 's'} ({self.reason}){without}"


def choose_threads(
    requested: int | None, model: Any, *, device: str = "auto", run: Path | None = None
) -> Threads:
    """Choose the threads of a command that runs the model of config `model`.

    In order: the number requested; OMP_NUM_THREADS, which torch has read; the number that the run
    in the folder `run` was saved with, so that its bits repeat; one for a small model on a CPU.
    oneDNN is as the run was saved with, and off for a small model on an ARM CPU.
    """
    check(requested is None or requested >= 1, f"--threads {requested}; it must be at least 1")
    check(requested is None or requested <= MOST, f"--threads {requested}; {MOST} is the most")
    saved = None if run is None else saved_state(run)
    on_cpu = pick_device(device).type == "cpu"
    parameters = count_model(model) if on_cpu else None
    small = parameters is not None and parameters < SMALL
    onednn = False if small and is_arm() else None
    if saved is not None:
        onednn = _saved_onednn(saved)
    if requested is not None:
        return Threads(requested, "--threads", onednn)
    if "OMP_NUM_THREADS" in os.environ:
        return Threads(None, "OMP_NUM_THREADS", onednn)
    if saved is not None and (count := _saved_count(saved)) is not None:
        reason = "as the run was begun, so that its bits repeat; --threads N sets it"
        return Threads(count, reason, onednn)
    if parameters is None:
        return Threads(None, "torch's default; the model is on a GPU", onednn)
    if small:
        return Threads(1, f"enough for {parameters:,} parameters; --threads N sets it", onednn)
    reason = f"torch's default, for {parameters:,} parameters; --threads N sets it"
    return Threads(None, reason, onednn)


def use_threads(threads: Threads) -> None:
    """Set torch's number of threads, and oneDNN on or off, for the whole process."""
    if threads.number is not None and threads.number != torch.get_num_threads():
        torch.set_num_threads(threads.number)
    if threads.onednn is not None and threads.onednn != uses_onednn():
        torch.backends.mkldnn.enabled = threads.onednn  # type: ignore[assignment]


def uses_onednn() -> bool:
    """Return True where torch gives float32 products to oneDNN."""
    return has_onednn() and bool(torch.backends.mkldnn.enabled)


def has_onednn() -> bool:
    """Return True where torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def is_arm() -> bool:
    """Return True on an ARM CPU whose torch has oneDNN."""
    return platform.machine() in ("aarch64", "arm64") and has_onednn()


def cpu_state() -> dict[str, Any]:
    """Return the settings on which the rounding of sums on a CPU depends, for state.json."""
    return {"threads": torch.get_num_threads(), "onednn": uses_onednn()}


def saved_state(run: Path) -> dict[str, Any] | None:
    """Return the state of the run's latest checkpoint; None where there is none to read."""
    found = checkpoints(run / CHECKPOINTS)
    try:
        return read_json(found[-1] / STATE) if found else None
    except UserError:
        return None  # resuming reports the damage


def _saved_count(state: dict[str, Any]) -> int | None:
    saved = state.get("threads")
    return saved if type(saved) is int and saved >= 1 else None


def _saved_onednn(state: dict[str, Any]) -> bool | None:
    saved = state.get("onednn")  # absent in version 0.1, which left torch's setting
    return saved if type(saved) is bool else None


def threads_note(state: dict[str, Any]) -> str | None:
    """Return a line to print if a checkpoint was saved with other settings of the CPU, or None."""
    before, now = state.get("threads"), torch.get_num_threads()
    if before not in (None, now):
        return (
            f"the run was saved with {before} threads and goes on with {now}: sums are rounded "
            f"differently, so bits will differ; OMP_NUM_THREADS={before} repeats them"
        )
    onednn = _saved_onednn(state)
    if onednn not in (None, uses_onednn()):
        return (
            f"the run was saved {'with' if onednn else 'without'} oneDNN and goes on "
            f"{'without' if onednn else 'with'} it: sums are rounded differently, so bits will "
            f"differ; torch.backends.mkldnn.enabled={onednn} repeats them"
        )
    return None


def count_model(model: Any) -> int:
    """Return the number of parameters of a model config, without allocating or drawing them."""
    with torch.device("meta"), _WithoutValues():
        return count_parameters(build_model(model)).total


class _WithoutValues(TorchFunctionMode):
    """Skips in-place functions such as `normal_`, which only give parameters their first values.

    On the meta device some of them import torch's compiler, which takes 2 s.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
