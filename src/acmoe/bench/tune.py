"""Find the fastest block sizes of each expert kernel, and write them where the kernels look.

Candidates are compiled first, in as many processes as there are cores: Triton keeps what it
compiled on disk, so that the process that measures finds everything there.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token.
"""

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acmoe.bench.check import TOLERANCE
from acmoe.bench.clock import Action, clock_for, interleave, timings
from acmoe.bench.results import Report, new_report
from acmoe.bench.shapes import SHAPES, Shape, find_shapes
from acmoe.bench.weights import Weights, draw_tokens, draw_weights
from acmoe.errors import check
from acmoe.evaluate.device import pick_device
from acmoe.experts.dispatch import Order, sort_by_expert
from acmoe.kernels import tuning
from acmoe.kernels.tuning import Blocks

Call = Callable[[], Tensor | tuple[Tensor | None, ...]]

KERNELS = ("up", "down", "hidden", "down_weight", "up_weight", "input")
TABLE = Path(tuning.__file__).with_name("tuned.json")
_COMPILE_TOKENS = 256  # enough to launch a kernel once
# (m, n, k, warps, stages) worth a try on a Hopper card, by the copy engine.
_LARGE = (
    *((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4)),
    *((128, 256, 32, 8, 4), (256, 128, 32, 8, 4)),
)
# Also with plain loads, whose addresses take registers that a larger accumulator needs.
_SMALL = (
    *((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4)),
    *((128, 128, 32, 8, 4), (128, 128, 32, 4, 4), (128, 128, 128, 8, 2), (128, 64, 64, 4, 4)),
    *((64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 4, 3), (64, 256, 64, 4, 4)),
)
_SPLITS = (1, 2, 3, 4, 6)  # of an expert's rows, for weights of few tiles
_MOST_PROGRAMS = 1056  # of a split product: 8 a multiprocessor of an H200; more only sum more parts


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What `acmoe bench tune` sweeps."""

    shapes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = KERNELS
    workers: int | None = None  # processes that compile; None: one a core
    repeat: int = 15
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            known = ", ".join(KERNELS)
            check(kernel in KERNELS, f"kernel {kernel!r} is unknown; choose among {known}")
        check(self.repeat >= 2, f"repeat={self.repeat}; quartiles need at least 2 rounds")


class Job(NamedTuple):
    """One candidate to compile, in a process of its own."""

    shape: str
    kernel: str
    blocks: Blocks


class Found(NamedTuple):
    """One candidate's time."""

    blocks: Blocks
    ms: float


def candidates(kernel: str, shape: Shape) -> list[Blocks]:
    """Gated experts hold two accumulators in their first product, so no tile 256 wide there.

    Programs that stay sum rows to weights, not gathered tokens.
    """
    double = kernel == "up" and shape.activation == "swiglu"
    weight = kernel in ("down_weight", "up_weight")
    tiles = [(*tile, True) for tile in _LARGE + _SMALL] + [(*tile, False) for tile in _SMALL]
    found = [Blocks(*tile) for tile in tiles if not (double and tile[1] == 256)]
    if not weight or _copies(shape, backward=True):
        found += [_persistent(one) for one in found if one.tma and one.m * one.n >= 128 * 128]
    if not weight:
        return found
    return [blocks._replace(splits=n) for blocks in found for n in _splits(blocks, shape)]


def _copies(shape: Shape, *, backward: bool) -> bool:
    sizes = (shape.dim, shape.hidden, shape.num_experts, shape.width)
    return tuning.copies_rows(*sizes, backward=backward)


def _persistent(blocks: Blocks) -> Blocks:
    """By programs that stay: one of 8 warps, or two of 4, take a multiprocessor's registers."""
    return blocks._replace(persistent=8 // blocks.num_warps)


def _splits(blocks: Blocks, shape: Shape) -> list[int]:
    """1, and more where that leaves the chip idle."""
    outputs = shape.num_experts * shape.dim * shape.width
    programs = outputs // (blocks.m * blocks.n)
    return [splits for splits in _SPLITS if splits == 1 or splits * programs <= _MOST_PROGRAMS]


def compile_jobs(shapes: Iterable[Shape], kernels: Sequence[str]) -> list[Job]:
    """Each kernel once for every set of constants it is compiled with, not once for every shape."""
    jobs: dict[tuple[object, ...], Job] = {}
    for shape in shapes:
        for kernel in kernels:
            for blocks in candidates(kernel, shape):
                sizes = (shape.dim, shape.hidden, shape.width)
                even = tuple(size % blocks.k == 0 for size in sizes)
                whole = tuple(size >= side for size in sizes for side in blocks[:2])
                split = blocks.splits > 1  # parts are float32, however many
                tile = blocks._replace(splits=0)
                copied = _copies(shape, backward=kernel != "up")
                constants = (kernel, shape.activation, tile, even, whole, split, copied)
                jobs.setdefault(constants, Job(shape.name, kernel, blocks))
    return list(jobs.values())


def bench_tune(config: TuneConfig, *, table: Path = TABLE, command: str = "") -> Report:
    device = pick_device(config.device)
    check(device.type == "cuda", f"tuning times kernels on CUDA; device={device} has none")
    shapes = find_shapes(config.shapes, device)
    _compile(compile_jobs(shapes, config.kernels), config.workers)
    rows: list[dict[str, Any]] = []
    winners: dict[str, Blocks] = {}
    for shape in shapes:
        calls = kernel_calls(shape, device, config.seed)
        for kernel in config.kernels:
            ranked = rank(kernel, calls[kernel], candidates(kernel, shape), device, config.repeat)
            key = tuning.key(kernel, shape.dim, shape.hidden, shape.num_experts)
            winners[key] = ranked[0].blocks
            rows.append(_row(shape, kernel, ranked))
    write_winners(winners, table)
    return new_report("tune", device, command, config, rows)


def _compile(jobs: Sequence[Job], workers: int | None) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context) as pool:
        for _ in pool.map(compile_one, jobs, chunksize=4):
            pass


def compile_one(job: Job) -> None:
    """Launch the candidate once. One that cannot be, as for shared memory, drops out later."""
    shape = replace(SHAPES[job.shape], tokens=_COMPILE_TOKENS)
    call = kernel_calls(shape, torch.device("cuda"), 0)[job.kernel]
    with contextlib.suppress(Exception):
        _run(job.kernel, job.blocks, call)
        torch.cuda.synchronize()


def _run(kernel: str, blocks: Blocks, call: Call) -> list[Tensor]:
    """The kernel's results with these blocks."""
    tuning.OVERRIDE[kernel] = blocks
    try:
        found = call()
    finally:
        tuning.OVERRIDE.clear()
    return _tensors(found)


def _tensors(found: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    several = found if isinstance(found, tuple) else (found,)
    return [one for one in several if one is not None]


def _agrees(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Blocks change the order of sums, not the result; NaN never agrees."""
    return all(
        bool((one - other).float().norm() < TOLERANCE[one.dtype] * other.float().norm())
        for one, other in zip(found, wanted, strict=True)
    )


def rank(
    kernel: str, call: Call, blocks: Sequence[Blocks], device: torch.device, repeat: int
) -> list[Found]:
    """The candidates that run and compute what the default does, fastest first."""
    tuning.OVERRIDE.clear()
    wanted = _tensors(call())
    actions: dict[str, Action] = {}
    for place, one in enumerate(blocks):
        try:
            right = _agrees(_run(kernel, one, call), wanted)
        except Exception:  # Triton raises many kinds; each only rules this candidate out
            continue
        if right:
            actions[str(place)] = partial(_run, kernel, one, call)
    check(bool(actions), f"no candidate of kernel {kernel!r} runs on {device}")
    times = timings(interleave(actions, rounds=repeat, clock=clock_for(device)))
    found = [Found(blocks[int(place)], time.median) for place, time in times.items()]
    return sorted(found, key=lambda one: one.ms)


def write_winners(winners: dict[str, Blocks], table: Path) -> None:
    """Into the table, beside the keys that were not tuned this time."""
    before: dict[str, list[Any]] = json.loads(table.read_text()) if table.exists() else {}
    after = before | {key: list(blocks) for key, blocks in winners.items()}
    lines = [f"  {json.dumps(key)}: {json.dumps(after[key])}" for key in sorted(after)]
    table.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _row(shape: Shape, kernel: str, ranked: Sequence[Found]) -> dict[str, Any]:
    inner = shape.hidden if kernel in ("down", "hidden", "down_weight") else shape.width
    best = ranked[0]
    return {
        "shape": shape.name,
        "kernel": kernel,
        "blocks": list(best.blocks),
        "ms": best.ms,
        "tflops": 2 * shape.rows * shape.dim * inner / best.ms / 1e9,
        "second_ms": ranked[1].ms if len(ranked) > 1 else None,
        "candidates": [{"blocks": list(one.blocks), "ms": one.ms} for one in ranked],
    }


def kernel_calls(shape: Shape, device: torch.device, seed: int) -> dict[str, Call]:
    """Each kernel's launch on random tokens, as ops/experts.py makes it."""
    from acmoe.kernels import experts as launch
    from acmoe.kernels.expert_sizes import sizes_of
    from acmoe.kernels.expert_tokens import source_of
    from acmoe.kernels.tiles import Plan

    generator = torch.Generator(device).manual_seed(seed)
    weights = draw_weights(shape, generator=generator)
    x_TD, grad_TD = (draw_tokens(shape, generator=generator) for _ in range(2))
    order, gate_TK = _random_order(shape, generator)
    size = sizes_of(x_TD, weights.down, gate_TK, shape.activation)
    plan = Plan(order.order, order.end, shape.top_k)
    none = torch.zeros(1, dtype=torch.int64, device=device)  # a seed nobody draws with
    up, down, up_bias, down_bias = _detached(weights)
    a_NF, dh_NW = (
        torch.randn(shape.rows, width, generator=generator, device=device, dtype=x_TD.dtype)
        for width in (shape.hidden, shape.width)
    )
    x, later, grad = (
        source_of(tokens_TD, order.back, size, gather=not _copies(shape, backward=backward))
        for tokens_TD, backward in ((x_TD, False), (x_TD, True), (grad_TD, True))
    )

    def backward(kernel: str, rows: Tensor, weight: Tensor, gather: bool) -> Tensor:
        how = {"across": True, "gather": gather}
        return launch.run_rows(kernel, rows, weight, None, plan, size, **how)

    return {
        "up": lambda: launch.run_up(x, up, up_bias, plan, size, 0.0, none),
        "down": lambda: launch.run_rows("down", a_NF, down, down_bias, plan, size),
        "hidden": lambda: backward("hidden", grad.values, down, grad.gather),
        "input": lambda: backward("input", dh_NW, up, False),
        "down_weight": lambda: launch.run_weight(
            *("down_weight", grad.values, a_NF, plan, size),
            gather="p" if grad.gather else "none",
        ),
        "up_weight": lambda: launch.run_weight(
            *("up_weight", dh_NW, later.values, plan, size),
            gather="q" if later.gather else "none",
        ),
    }


def _random_order(shape: Shape, generator: torch.Generator) -> tuple[Order, Tensor]:
    size, device = (shape.tokens, shape.num_experts), generator.device
    score_TE = torch.rand(size, generator=generator, device=device)
    gate_TK, expert_ids_TK = score_TE.topk(shape.top_k)
    return sort_by_expert(expert_ids_TK, shape.num_experts), gate_TK


def _detached(weights: Weights) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return (
        weights.up.detach(),
        weights.down.detach(),
        None if weights.up_bias is None else weights.up_bias.detach(),
        None if weights.down_bias is None else weights.down_bias.detach(),
    )
