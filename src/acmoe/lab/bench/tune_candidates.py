"""What the tuner tries: block sizes and rings, and which of them are compiled alike.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from acmoe.lab.bench.shapes import Shape
from acmoe.ops.device import tuning
from acmoe.ops.device.tuning import BY_ROWS, BY_WEIGHTS, PRODUCTS, Blocks, Ring

Candidate = Blocks | Ring | None  # None: by no ring

RING = "ring_"  # what a kernel's name has before it where a ring is meant, as in the table
RINGS = tuple(RING + product for product in (*BY_ROWS, *BY_WEIGHTS))
KERNELS = (*PRODUCTS, *RINGS)
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
# (stages, buffers of h) of the hidden units' gradient: what 227 KiB hold beside its outputs.
_HIDDEN = ((5, 2), (4, 4), (4, 2), (3, 4))
_TURNS, _TOGETHER, _LEADS = (4, 5, 6), (3, 4), (0, 2, 3)


@contextlib.contextmanager
def trying(kernel: str, candidate: Candidate) -> Iterator[None]:
    """Inside, the kernel has this candidate."""
    held: dict[str, Any] = tuning.RING_OVERRIDE if kernel in RINGS else tuning.OVERRIDE
    before = dict(held)
    held[kernel.removeprefix(RING)] = candidate
    try:
        yield
    finally:
        held.clear()
        held.update(before)


def candidates(kernel: str, shape: Shape, device: torch.device) -> Sequence[Candidate]:
    if kernel in RINGS:
        return rings(kernel.removeprefix(RING), shape, device)
    return blocks(kernel, shape)


def blocks(kernel: str, shape: Shape) -> list[Blocks]:
    """Gated experts hold two accumulators in their first product, so no tile 256 wide there.

    Programs that stay sum rows to weights, not gathered tokens.
    """
    double = kernel == "up" and shape.activation == "swiglu"
    weight = kernel in BY_WEIGHTS
    tiles = [(*tile, True) for tile in _LARGE + _SMALL] + [(*tile, False) for tile in _SMALL]
    found = [Blocks(*tile) for tile in tiles if not (double and tile[1] == 256)]
    if not weight or copies(shape, backward=True):
        found += [_persistent(one) for one in found if one.tma and one.m * one.n >= 128 * 128]
    if not weight:
        return found
    return [one._replace(splits=n) for one in found for n in _splits(one, shape)]


def rings(product: str, shape: Shape, device: torch.device) -> list[Ring | None]:
    """No ring, and those that can run here; no ring alone where none can."""
    can = [ring for ring in _forms(product) if obstacle(product, ring, shape, device) is None]
    return [None, *can]


def obstacle(product: str, ring: Ring, shape: Shape, device: torch.device) -> str | None:
    """What keeps a product of this layer from a ring."""
    from acmoe.ops.experts.hopper.choice import ring_obstacle
    from acmoe.ops.experts.triton.sizes import Sizes

    sizes = (shape.dim, shape.hidden, shape.num_experts)
    size = Sizes(shape.tokens, *sizes, shape.top_k, shape.activation)
    # The gradient's rows, once copied for the hidden units, serve the second weight too; x may be
    # gathered for the first one instead of copied.
    gather = product in ("hidden", *BY_WEIGHTS)
    if copies(shape, backward=True):
        gather = product == "up_weight" and ring.gathers
    if product in BY_WEIGHTS and ring.gathers and not gather:
        return "it gathers, and the rows are there"
    bare = product not in ("hidden", "down") or not shape.bias
    with trying(RING + product, ring):
        return ring_obstacle(*(product, size, torch.bfloat16, device), gather=gather, bare=bare)


def no_ring(product: str, shape: Shape, device: torch.device) -> str:
    """Why none of the forms can run."""
    return str(obstacle(product, _forms(product)[-1], shape, device))


def _forms(product: str) -> list[Ring]:
    if product == "hidden":
        return [Ring("turns", *sizes) for sizes in _HIDDEN]
    if product in BY_WEIGHTS:
        return [Ring("together", n, gathers=some) for n in _TOGETHER for some in (False, True)]
    turns = [Ring("turns", stages) for stages in _TURNS]
    return turns + [Ring("together", n, lead=lead) for n in _TOGETHER for lead in _LEADS]


def copies(shape: Shape, *, backward: bool) -> bool:
    """Whether the layer's products read copied rows, unless a ring gathers."""
    sizes = (shape.dim, shape.hidden, shape.num_experts, shape.width)
    return tuning.copies_rows(*sizes, backward=backward)


def _persistent(one: Blocks) -> Blocks:
    """By programs that stay: one of 8 warps, or two of 4, take a multiprocessor's registers."""
    return one._replace(persistent=8 // one.num_warps)


def _splits(one: Blocks, shape: Shape) -> list[int]:
    """1, and more where that leaves the chip idle."""
    outputs = shape.num_experts * shape.dim * shape.width
    programs = outputs // (one.m * one.n)
    return [splits for splits in _SPLITS if splits == 1 or splits * programs <= _MOST_PROGRAMS]


class Job(NamedTuple):
    """One candidate to compile, in a process of its own."""

    shape: str
    kernel: str
    candidate: Candidate


def compile_jobs(
    shapes: Iterable[Shape], kernels: Sequence[str], device: torch.device
) -> list[Job]:
    """Each kernel once for every set of constants it is compiled with, not once for every shape."""
    jobs: dict[tuple[object, ...], Job] = {}
    for shape in shapes:
        for kernel in kernels:
            for one in candidates(kernel, shape, device):
                constants = (kernel, *_constants(one, shape, kernel))
                jobs.setdefault(constants, Job(shape.name, kernel, one))
    return list(jobs.values())


def _constants(one: Candidate, shape: Shape, kernel: str) -> tuple[object, ...]:
    """What a candidate is compiled for, besides its name."""
    if not isinstance(one, Blocks):
        return (one, shape.name if one is None else None)  # no ring: by blocks of this shape
    sizes = (shape.dim, shape.hidden, shape.width)
    even = tuple(size % one.k == 0 for size in sizes)
    whole = tuple(size >= side for size in sizes for side in one[:2])
    split = one.splits > 1  # parts are float32, however many
    copied = copies(shape, backward=kernel != "up")
    return (one._replace(splits=0), shape.activation, even, whole, split, copied)
