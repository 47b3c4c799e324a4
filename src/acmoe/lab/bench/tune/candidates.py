"""Candidates of the tuner: block sizes and pipeline settings, and the jobs that compile them.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from acmoe.lab.bench.shapes import Shape
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings import lookup
from acmoe.ops.experts.settings.gemms import (
    COLUMNS,
    GEMMS,
    GROUPED_MM,
    ROW_GEMMS,
    WEIGHT_GEMMS,
    PipelineConfig,
)
from acmoe.ops.experts.settings.rules import FEW_ROWS
from acmoe.ops.experts.tune.candidates import COOPERATIVE as _COOPERATIVE
from acmoe.ops.experts.tune.candidates import FEW as _FEW
from acmoe.ops.experts.tune.candidates import HIDDEN as _HIDDEN
from acmoe.ops.experts.tune.candidates import LARGE as _LARGE
from acmoe.ops.experts.tune.candidates import PING_PONG as _PING_PONG
from acmoe.ops.experts.tune.candidates import SMALL as _SMALL
from acmoe.ops.experts.tune.candidates import persistent

if TYPE_CHECKING:
    from acmoe.ops.experts.triton.sizes import Sizes

Candidate = Blocks | PipelineConfig | None  # None: the Triton kernel instead of a pipeline

PIPELINE_PREFIX = "pipeline_"  # prefix of a GEMM's name for its Hopper pipeline, as in tuned.json
PIPELINES = tuple(PIPELINE_PREFIX + gemm for gemm in (*ROW_GEMMS, *WEIGHT_GEMMS))
KERNELS = (*GEMMS, *PIPELINES)
_SPLITS = (1, 2, 3, 4, 6)  # split-K factors of a weight gradient that has few tiles
# Most programs of a split-K GEMM: 8 per multiprocessor of an H200. More would only add up more
# partial results.
_MOST_PROGRAMS = 1056


@contextlib.contextmanager
def trying(kernel: str, candidate: Candidate) -> Iterator[None]:
    """Make the kernel use this candidate inside `with`."""
    held: dict[str, Any] = lookup.PIPELINE_OVERRIDE if kernel in PIPELINES else lookup.OVERRIDE
    before = dict(held)
    held[kernel.removeprefix(PIPELINE_PREFIX)] = candidate
    try:
        yield
    finally:
        held.clear()
        held.update(before)


def candidates(kernel: str, shape: Shape, device: torch.device) -> Sequence[Candidate]:
    """Return the candidates of a kernel for a layer of this shape."""
    if kernel in PIPELINES:
        return pipelines(kernel.removeprefix(PIPELINE_PREFIX), shape, device)
    return blocks(kernel, shape)


def blocks(kernel: str, shape: Shape) -> list[Blocks]:
    """Return the block sizes to try for a Triton GEMM.

    "up" of gated experts holds two accumulators, so tiles of 256 columns are left out. Persistent
    kernels for weight gradients cannot gather tokens.
    """
    double = kernel == "up" and shape.activation == "swiglu"
    weight = kernel in WEIGHT_GEMMS
    few = shape.rows <= FEW_ROWS * shape.num_experts
    small = _SMALL + _FEW * few
    tiles = [(*tile, True) for tile in _LARGE + small] + [(*tile, False) for tile in small]
    found = [Blocks(*tile) for tile in tiles if not (double and tile[1] == 256)]
    if not weight or copies(shape, backward=True):
        smallest = 0 if few else 128 * 128
        found += [persistent(one) for one in found if one.tma and one.m * one.n >= smallest]
    if not weight:
        return found
    return [one._replace(splits=n) for one in found for n in _splits(one, shape)]


def pipelines(gemm: str, shape: Shape, device: torch.device) -> list[PipelineConfig | None]:
    """Return None, and the pipeline settings that can run on this device."""
    can = [
        settings for settings in _forms(gemm) if unsupported(gemm, settings, shape, device) is None
    ]
    return [None, *can]


def unsupported(
    gemm: str, settings: PipelineConfig, shape: Shape, device: torch.device
) -> str | None:
    """Return the reason why a pipeline cannot compute this GEMM of the layer, or None."""
    from acmoe.ops.experts.hopper.choice import pipeline_unsupported

    size = _sizes(shape)
    # If rows are copied in backward, the copy of the upstream gradient is made for "hidden" and
    # serves "down_weight" too; x may still be gathered for "up_weight" instead of copied.
    gather = gemm in ("hidden", *WEIGHT_GEMMS)
    if copies(shape, backward=True):
        gather = gemm == "up_weight" and settings.gathers
    if gemm in WEIGHT_GEMMS and settings.gathers and not gather:
        return "it gathers rows that are already copied"
    bare = gemm not in ("hidden", "down") or not shape.bias
    with trying(PIPELINE_PREFIX + gemm, settings):
        return pipeline_unsupported(*(gemm, size, torch.bfloat16, device), gather=gather, bare=bare)


def no_pipeline(gemm: str, shape: Shape, device: torch.device) -> str:
    """Return the reason why no pipeline can compute this GEMM."""
    return str(unsupported(gemm, _forms(gemm)[-1], shape, device))


def _forms(gemm: str) -> list[PipelineConfig]:
    if gemm == "hidden":
        return list(_HIDDEN)
    if gemm in WEIGHT_GEMMS:
        return [
            GROUPED_MM,
            *(
                PipelineConfig("cooperative", n, gathers=some)
                for n in _COOPERATIVE
                for some in (False, True)
            ),
        ]
    ping_pong = [PipelineConfig("ping-pong", stages) for stages in _PING_PONG]
    cooperative = [PipelineConfig("cooperative", n) for n in _COOPERATIVE]
    columns = [COLUMNS] if gemm == "down" else []
    return [GROUPED_MM, *ping_pong, *columns, *cooperative]


def copies(shape: Shape, *, backward: bool) -> bool:
    """Return True if the layer's GEMMs read copied rows, unless a pipeline gathers them."""
    return lookup.copies_rows(_sizes(shape).layer(torch.bfloat16), backward=backward)


def _sizes(shape: Shape) -> "Sizes":
    from acmoe.ops.experts.triton.sizes import Sizes

    sizes = (shape.tokens, shape.dim, shape.hidden, shape.num_experts, shape.top_k)
    return Sizes(*sizes, shape.activation)


def _splits(one: Blocks, shape: Shape) -> list[int]:
    """Return the split-K factors to try: 1, and more if there are too few tiles for the GPU."""
    outputs = shape.num_experts * shape.dim * shape.width
    programs = outputs // (one.m * one.n)
    return [splits for splits in _SPLITS if splits == 1 or splits * programs <= _MOST_PROGRAMS]


class Job(NamedTuple):
    """One candidate to compile in a worker process."""

    shape: str
    kernel: str
    candidate: Candidate


def compile_jobs(
    shapes: Iterable[Shape], kernels: Sequence[str], device: torch.device
) -> list[Job]:
    """Return one job for every set of compile-time constants, instead of one for every shape."""
    jobs: dict[tuple[object, ...], Job] = {}
    for shape in shapes:
        for kernel in kernels:
            for one in candidates(kernel, shape, device):
                constants = (kernel, *_constants(one, shape, kernel))
                jobs.setdefault(constants, Job(shape.name, kernel, one))
    return list(jobs.values())


def _constants(one: Candidate, shape: Shape, kernel: str) -> tuple[object, ...]:
    """Return the compile-time constants of a candidate."""
    if not isinstance(one, Blocks):
        return (
            one,
            shape.name if one is None else None,
        )  # None: the Triton kernel with the blocks of this shape
    sizes = (shape.dim, shape.hidden, shape.width)
    even = tuple(size % one.k == 0 for size in sizes)
    whole = tuple(size >= side for size in sizes for side in one[:2])
    split = one.splits > 1  # partial results are float32, whatever their number
    copied = copies(shape, backward=kernel != "up")
    return (one._replace(splits=0), shape.activation, even, whole, split, copied)
