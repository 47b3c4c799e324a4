"""Find the fastest block sizes and pipeline settings of each expert kernel, and store them.

Candidates are compiled first, in one process per core. Triton caches compiled kernels on disk, so
that the measuring process compiles nothing.
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
from acmoe.lab.bench.harness.clock import Action, clock_for, interleave, timings
from acmoe.lab.bench.harness.progress import Say, silent
from acmoe.lab.bench.harness.results import Report, new_report
from acmoe.lab.bench.implementations.check import TOLERANCE
from acmoe.lab.bench.shapes import Shape, find_shape, find_shapes
from acmoe.lab.bench.tune.calls import kernel_calls
from acmoe.lab.bench.tune.candidates import (
    KERNELS,
    PIPELINE_PREFIX,
    PIPELINES,
    Candidate,
    Job,
    candidates,
    compile_jobs,
    no_pipeline,
    trying,
)
from acmoe.ops import device_support
from acmoe.ops.experts.settings import tables
from acmoe.ops.experts.tune.calls import Call
from acmoe.runtime import pick_device

_COMPILE_TOKENS = 256  # enough to launch a kernel once
_CONTEXT = 2**30  # bytes of GPU memory of a CUDA context


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """The options of `acmoe bench tune`."""

    shapes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = KERNELS
    table: str | None = None  # path of the table; None: that of ACMOE_TUNED, or the package's
    workers: int | None = None  # processes that compile; None: one per core
    repeat: int = 15
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            known = ", ".join(KERNELS)
            check(kernel in KERNELS, f"kernel {kernel!r} is unknown; choose among {known}")
        check(self.repeat >= 2, f"repeat={self.repeat}; quartiles need at least 2 rounds")


class Found(NamedTuple):
    """The time of one candidate."""

    candidate: Candidate
    ms: float


def bench_tune(config: TuneConfig, *, command: str = "", say: Say = silent) -> Report:
    """Tune all kernels of all shapes, and write each kernel's winner as soon as it is known."""
    device = pick_device(config.device)
    check(
        device.type == "cuda",
        f"device={device} has no CUDA kernels to time; tune on a machine with an NVIDIA GPU",
    )
    shapes = find_shapes(config.shapes, device)
    loaded = [shape.name for shape in shapes if shape.load]
    check(
        not loaded,
        f"shape {''.join(loaded[:1])!r}: tuning draws its own load; leave out what follows the +",
    )
    kernels = [
        kernel for kernel in KERNELS if kernel in config.kernels
    ]  # Triton GEMMs come before pipelines, which are compared with the best of them
    table = Path(config.table or os.environ.get("ACMOE_TUNED") or tables.TABLE)
    check(
        table != tables.TABLE or device_support.has_large_shared_memory(),
        "the package's table is for H100, H200 and B200, and kernels on this card do not look into "
        "it; name one of your own with --table, and later in the variable ACMOE_TUNED",
    )
    write_winners({}, table)  # fail now if the table cannot be written
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
    """Make kernels read this table inside `with`, also in the processes that compile."""
    if table == tables.TABLE:  # kernels read it anyway
        yield
        return
    before = os.environ.get("ACMOE_TUNED")
    os.environ["ACMOE_TUNED"] = str(table)
    tables.clear_cache()
    try:
        yield
    finally:
        del os.environ["ACMOE_TUNED"]
        if before is not None:
            os.environ["ACMOE_TUNED"] = before
        tables.clear_cache()


def tune_shape(
    shape: Shape,
    kernels: Sequence[str],
    table: Path,
    device: torch.device,
    repeat: int,
    seed: int,
    say: Say,
) -> Iterator[dict[str, Any]]:
    """Yield a row of the report for each kernel; the next kernels are measured with its winner."""
    calls = kernel_calls(shape, device, seed)
    with contextlib.ExitStack() as best:
        for kernel in kernels:
            tried = candidates(kernel, shape, device)
            if len(tried) == 1:
                why = no_pipeline(kernel.removeprefix(PIPELINE_PREFIX), shape, device)
                say(f"{shape.name}: {kernel} has no candidate, {why}")
                continue
            say(f"{shape.name}: {kernel}, {len(tried)} candidates")
            ranked = rank(kernel, calls[kernel], tried, device, repeat)
            winner = ranked[0].candidate
            name = tables.key(kernel, shape.dim, shape.hidden, shape.num_experts)
            write_winners({name: winner}, table)
            best.enter_context(trying(kernel, winner))
            yield _row(shape, kernel, ranked)


def _workers(shapes: Sequence[Shape]) -> int:
    """Return the number of compile processes: one per core, but no more than fit in GPU memory.

    Each needs a CUDA context, and the weights, gradients and rows of the largest layer.
    """
    weights = max(one.num_experts * one.dim * (one.width + one.hidden) for one in shapes)
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, free // (_CONTEXT + 3 * 2 * weights)))


def _compile(jobs: Sequence[Job], workers: int) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for _ in pool.map(compile_one, jobs, chunksize=4):
            pass


def compile_one(job: Job) -> None:
    """Launch the candidate once, to compile it; if it fails, `rank` will leave it out."""
    shape = replace(find_shape(job.shape), tokens=_COMPILE_TOKENS)
    with contextlib.suppress(Exception):
        call = kernel_calls(shape, torch.device("cuda"), 0)[job.kernel]
        _run(job.kernel, job.candidate, call)
        torch.cuda.synchronize()


def _run(kernel: str, candidate: Candidate, call: Call) -> list[Tensor]:
    """Return the kernel's results with this candidate."""
    with trying(kernel, candidate):
        return _tensors(call())


def _tensors(found: tuple[Tensor, ...]) -> list[Tensor]:
    return [one for one in found if one.numel() > 0]


def _agrees(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return True if every row agrees within the tolerance of the lowest-precision result.

    Candidates may change the order of sums and intermediate rounding. NaN never agrees.
    """
    tolerance = max(TOLERANCE[one.dtype] for one in wanted)
    return all(
        bool((_off(one, other) <= tolerance * (_size(other) + _size(other).mean())).all())
        for one, other in zip(found, wanted, strict=True)
    )


def _size(one: Tensor) -> Tensor:
    """Return the norm of every row."""
    size: Tensor = one.float().norm(dim=-1)
    return size


def _off(one: Tensor, other: Tensor) -> Tensor:
    return _size(one.float() - other.float())


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill newly allocated memory with NaN inside `with`, so that no old result is read."""
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
    """Return the candidates that run and agree with the default, fastest first.

    The default of a pipeline is the Triton kernel, because a wrong pipeline must not be the
    reference of others.
    """
    wanted = _run(kernel, None, call) if kernel in PIPELINES else _tensors(call())
    actions: dict[str, Action] = {}
    for index, one in enumerate(tried):
        try:
            with poisoned():
                right = _agrees(_run(kernel, one, call), wanted)
        except Exception:  # whatever Triton raises, only this candidate is left out
            continue
        if right:
            actions[str(index)] = partial(_run, kernel, one, call)
    check(
        bool(actions),
        f"no candidate of kernel {kernel!r} runs on {device}; leave it out of --kernels",
    )
    times = timings(interleave(actions, rounds=repeat, clock=clock_for(device)))
    found = [Found(tried[int(index)], time.median) for index, time in times.items()]
    return sorted(found, key=lambda one: one.ms)


def write_winners(winners: dict[str, Candidate], table: Path) -> None:
    """Write the winners into the table; keep the rows of other keys."""
    after = tables.read_table(table) | {name: _listed(one) for name, one in winners.items()}
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
    second = ("down", "hidden", "down_weight")  # GEMMs with the weight `down`, the others with `up`
    inner = shape.hidden if kernel.removeprefix(PIPELINE_PREFIX) in second else shape.width
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
