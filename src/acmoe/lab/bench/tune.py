"""Find the fastest block sizes and rings of each expert kernel, and write them where kernels look.

Candidates are compiled first, in as many processes as there are cores: Triton keeps what it
compiled on disk, so that the process that measures finds everything there.
"""

import contextlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acmoe.errors import UserError, check
from acmoe.lab.bench.check import TOLERANCE
from acmoe.lab.bench.clock import Action, clock_for, interleave, timings
from acmoe.lab.bench.progress import Say, silent
from acmoe.lab.bench.results import Report, new_report
from acmoe.lab.bench.shapes import Shape, find_shape, find_shapes
from acmoe.lab.bench.tune_calls import Call, kernel_calls
from acmoe.lab.bench.tune_candidates import (
    KERNELS,
    RING,
    RINGS,
    Candidate,
    Job,
    candidates,
    compile_jobs,
    no_ring,
    trying,
)
from acmoe.ops.device import tuning
from acmoe.runtime import pick_device

_COMPILE_TOKENS = 256  # enough to launch a kernel once
_CONTEXT = 2**30  # bytes of the card that a process takes before it has any tensor


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What `acmoe bench tune` sweeps."""

    shapes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = KERNELS
    table: str | None = None  # None: that which ACMOE_TUNED names, else the package's
    workers: int | None = None  # processes that compile; None: one a core
    repeat: int = 15
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            known = ", ".join(KERNELS)
            check(kernel in KERNELS, f"kernel {kernel!r} is unknown; choose among {known}")
        check(self.repeat >= 2, f"repeat={self.repeat}; quartiles need at least 2 rounds")


class Found(NamedTuple):
    """One candidate's time."""

    candidate: Candidate
    ms: float


def bench_tune(config: TuneConfig, *, command: str = "", say: Say = silent) -> Report:
    """Each kernel's winner is written as soon as it is known, so that nothing measured is lost."""
    device = pick_device(config.device)
    check(device.type == "cuda", f"tuning times kernels on CUDA; device={device} has none")
    shapes = find_shapes(config.shapes, device)
    kernels = [kernel for kernel in KERNELS if kernel in config.kernels]  # rings against the best
    table = Path(config.table or os.environ.get("ACMOE_TUNED") or tuning.TABLE)
    check(
        table != tuning.TABLE or tuning.has_room(),
        "the package's table is for H100, H200 and B200, and kernels on this card do not look into "
        "it; name one of your own with --table, and later in the variable ACMOE_TUNED",
    )
    write_winners({}, table)  # a table that cannot be written had better be known now
    with reading(table):
        jobs = compile_jobs(shapes, kernels, device)
        say(f"compiling {len(jobs)} candidates")
        _compile(jobs, config.workers or _workers(shapes))
        rows = [
            row
            for shape in shapes
            for row in tune_shape(shape, kernels, table, device, config.repeat, config.seed, say)
        ]
    return new_report("tune", device, command, config, rows)


@contextlib.contextmanager
def reading(table: Path) -> Iterator[None]:
    """Inside, and in the processes that compile, kernels look into this table first."""
    if table == tuning.TABLE:  # they do
        yield
        return
    before = os.environ.get("ACMOE_TUNED")
    os.environ["ACMOE_TUNED"] = str(table)
    tuning.forget()
    try:
        yield
    finally:
        del os.environ["ACMOE_TUNED"]
        if before is not None:
            os.environ["ACMOE_TUNED"] = before
        tuning.forget()


def tune_shape(
    shape: Shape,
    kernels: Sequence[str],
    table: Path,
    device: torch.device,
    repeat: int,
    seed: int,
    say: Say,
) -> Iterator[dict[str, Any]]:
    """A row for every kernel, whose winner those after it are measured with."""
    calls = kernel_calls(shape, device, seed)
    with contextlib.ExitStack() as best:
        for kernel in kernels:
            tried = candidates(kernel, shape, device)
            if len(tried) == 1:
                why = no_ring(kernel.removeprefix(RING), shape, device)
                say(f"{shape.name}: {kernel} has no candidate, {why}")
                continue
            say(f"{shape.name}: {kernel}, {len(tried)} candidates")
            ranked = rank(kernel, calls[kernel], tried, device, repeat)
            winner = ranked[0].candidate
            name = tuning.key(kernel, shape.dim, shape.hidden, shape.num_experts)
            write_winners({name: winner}, table)
            best.enter_context(trying(kernel, winner))
            yield _row(shape, kernel, ranked)


def _workers(shapes: Sequence[Shape]) -> int:
    """One a core, but no more than have room for a context and the widest layer's weights, their
    gradients and its rows."""
    weights = max(one.num_experts * one.dim * (one.width + one.hidden) for one in shapes)
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, free // (_CONTEXT + 3 * 2 * weights)))


def _compile(jobs: Sequence[Job], workers: int) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for _ in pool.map(compile_one, jobs, chunksize=4):
            pass


def compile_one(job: Job) -> None:
    """Launch the candidate once. One that cannot be, as for shared memory, drops out later."""
    shape = replace(find_shape(job.shape), tokens=_COMPILE_TOKENS)
    with contextlib.suppress(Exception):
        call = kernel_calls(shape, torch.device("cuda"), 0)[job.kernel]
        _run(job.kernel, job.candidate, call)
        torch.cuda.synchronize()


def _run(kernel: str, candidate: Candidate, call: Call) -> list[Tensor]:
    """The kernel's results with this candidate."""
    with trying(kernel, candidate):
        return _tensors(call())


def _tensors(found: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [one for one in found if one is not None and one.numel() > 0]


def _agrees(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Candidates change the order of sums and what is rounded on the way, not the result: of no row
    more than the coarsest result may be off. NaN never agrees."""
    tolerance = max(TOLERANCE[one.dtype] for one in wanted)
    return all(
        bool((_off(one, other) <= tolerance * (_size(other) + _size(other).mean())).all())
        for one, other in zip(found, wanted, strict=True)
    )


def _size(one: Tensor) -> Tensor:
    """Of every row."""
    size: Tensor = one.float().norm(dim=-1)
    return size


def _off(one: Tensor, other: Tensor) -> Tensor:
    return _size(one.float() - other.float())


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, new memory holds NaN and not what the last candidate left in it."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def rank(
    kernel: str, call: Call, tried: Sequence[Candidate], device: torch.device, repeat: int
) -> list[Found]:
    """The candidates that run and compute what the default does, fastest first.

    Of rings that is no ring: one that is wrong must not be the measure of others.
    """
    wanted = _run(kernel, None, call) if kernel in RINGS else _tensors(call())
    actions: dict[str, Action] = {}
    for place, one in enumerate(tried):
        try:
            with poisoned():
                right = _agrees(_run(kernel, one, call), wanted)
        except Exception:  # Triton raises many kinds; each only rules this candidate out
            continue
        if right:
            actions[str(place)] = partial(_run, kernel, one, call)
    check(bool(actions), f"no candidate of kernel {kernel!r} runs on {device}")
    times = timings(interleave(actions, rounds=repeat, clock=clock_for(device)))
    found = [Found(tried[int(place)], time.median) for place, time in times.items()]
    return sorted(found, key=lambda one: one.ms)


def write_winners(winners: dict[str, Candidate], table: Path) -> None:
    """Into the table, beside the keys that were not tuned this time."""
    after = tuning.read_table(table) | {name: _listed(one) for name, one in winners.items()}
    lines = [f"  {json.dumps(key)}: {json.dumps(after[key])}" for key in sorted(after)]
    draft = table.with_name(f"{table.name}.{os.getpid()}.draft")
    try:
        draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(draft, table)
    except OSError as error:
        raise UserError(
            f"{table} cannot be written ({error}); name another file with --table, and later in "
            "the variable ACMOE_TUNED"
        ) from error


def _listed(one: Candidate) -> list[Any] | None:
    return None if one is None else list(one)


def _row(shape: Shape, kernel: str, ranked: Sequence[Found]) -> dict[str, Any]:
    second = ("down", "hidden", "down_weight")  # of the layer's two products
    inner = shape.hidden if kernel.removeprefix(RING) in second else shape.width
    best = ranked[0]
    return {
        "shape": shape.name,
        "kernel": kernel,
        "blocks": _listed(best.candidate),
        "ms": best.ms,
        "tflops": 2 * shape.rows * shape.dim * inner / best.ms / 1e9,
        "second_ms": ranked[1].ms if len(ranked) > 1 else None,
        "candidates": [{"blocks": _listed(one.candidate), "ms": one.ms} for one in ranked],
    }
