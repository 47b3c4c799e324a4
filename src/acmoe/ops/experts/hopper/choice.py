"""The experts' products by a ring of shared memory (ring.py) where that is known to be faster.

Everywhere else, and wherever the ring cannot, by what Triton pipelines: experts.py. D features, F
hidden units, W = 2F, N rows.
"""

import functools
import logging

import torch
from torch import Tensor

from acmoe.config.environment import gluon_wanted
from acmoe.ops.device.hopper import gluon_obstacle
from acmoe.ops.device.tuning import (
    BY_WEIGHTS,
    RING_DEPTH,
    RING_HEIGHT,
    Ring,
    copies_rows,
    ring_for,
)
from acmoe.ops.experts.triton import launch as experts
from acmoe.ops.experts.triton.sizes import Shares, Sizes, Source, Sums
from acmoe.ops.experts.triton.tiles import Plan

_log = logging.getLogger("acmoe")


def _sides(kernel: str, size: Sizes, gather: bool) -> tuple[int, int]:
    """Inner and outer dimension of a product by rows; wide and narrow side of a weight's gradient,
    of which tokens to gather are the narrow one."""
    if kernel == "up_weight" and gather:
        return size.width, size.dim
    return {
        "hidden": (size.dim, size.hidden),
        "down": (size.hidden, size.dim),
        "input": (size.width, size.dim),
        "down_weight": (size.hidden, size.dim),
        "up_weight": (size.dim, size.width),
    }[kernel]


def _shape_obstacle(kernel: str, size: Sizes, ring: Ring, gather: bool) -> str | None:
    """Tiles must be whole. Of groups together one waits for the other's `lead` blocks: a product by
    rows that has fewer blocks than the ring places, or a ring with fewer than these, would wait
    forever."""
    inner, outer = _sides(kernel, size, gather)
    weight = kernel in BY_WEIGHTS
    other = {"hidden": "together"}.get(kernel, "turns" if weight else None)
    if ring.form == other:
        return f"there is no product {kernel} in the form {ring.form!r}"
    steps = (ring.columns, RING_HEIGHT) if weight else (RING_DEPTH, ring.columns)
    if inner % steps[0] or outer % steps[1]:
        return f"its tiles need multiples of {steps[0]} and {steps[1]}, not {inner}, {outer}"
    if ring.lead > ring.stages:
        return f"its second group starts {ring.lead} blocks later, in a ring of {ring.stages}"
    if not weight and ring.form == "together" and inner // RING_DEPTH < ring.stages:
        return f"its ring needs {ring.stages} blocks of {RING_DEPTH}, more than {inner}"
    return None


def ring_obstacle(
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gather: bool,
    bare: bool = True,
    result: torch.dtype | None = None,
) -> str | None:
    """What keeps a product from the ring. bare: without bias and dropout; gather: of tokens;
    result: its dtype, None for that of the tokens."""
    ring = ring_for(kernel, size.dim, size.hidden, size.experts)
    if ring is None:
        return "it was not found faster for this shape"
    if dtype != torch.bfloat16:
        return f"it takes bfloat16, not {dtype}"
    if result not in (None, dtype):
        # A cast would round, and take a pass: at olmoe 2.4 GB, by bytes 0.6 ms, where a ring saves
        # 0.2. Not timed.
        return f"it gives bfloat16, and the weights are {result}"
    if not bare or (kernel == "hidden" and size.act != "swiglu"):
        return "it has neither bias nor dropout, and of activations swiglu"
    if gather and not (ring.gathers and kernel in BY_WEIGHTS):
        return "it reads rows, and tokens are gathered for this shape"
    return _shape_obstacle(kernel, size, ring, gather) or gluon_obstacle(device)


def gathers(
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    result: torch.dtype | None = None,
) -> bool:
    """Whether a product gathers its tokens, instead of reading rows that were copied first.

    Of the backward's two copies that of x may be saved alone: it serves the gradient of the first
    weight, for which a ring may gather. The other serves two products, one by a ring of rows.
    """
    sizes = (size.dim, size.hidden, size.experts)
    if not copies_rows(*sizes, size.width, backward=kernel != "up"):
        return True
    ring = ring_for(kernel, *sizes)
    if kernel != "up_weight" or ring is None or not ring.gathers:
        return False
    return ring_obstacle(kernel, size, dtype, device, gather=True, result=result) is None


@functools.lru_cache(maxsize=256)
def _ring(
    wanted: str,
    ring: Ring | None,
    kernel: str,
    size: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    gather: bool,
    bare: bool,
    result: torch.dtype | None,
) -> Ring | None:
    """The ring that this kind of call has, if nothing keeps it from that; says so once.

    wanted: of the environment, which `ring_obstacle` asks: for another wish another answer.
    """
    how = {"gather": gather, "bare": bare}
    obstacle = ring_obstacle(kernel, size, dtype, device, **how, result=result)
    if obstacle is None:
        _log.info("the experts' product %s runs on gluon", kernel)
        return ring
    _log.info("the experts' product %s runs on triton; gluon: %s", kernel, obstacle)
    return None


def _ring_of(
    kernel: str,
    size: Sizes,
    x: Tensor,
    *,
    gather: bool,
    bare: bool,
    result: torch.dtype | None = None,
) -> Ring | None:
    """None: not by a ring. Batches of any size are one kind of call."""
    ring = ring_for(kernel, size.dim, size.hidden, size.experts)
    where = (size._replace(tokens=0), x.dtype, x.device)
    return _ring(gluon_wanted(), ring, kernel, *where, gather, bare, result)


def run_rows(
    kernel: str,
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    size: Sizes,
    *,
    across: bool = False,
) -> Tensor:
    """(N, O): rows times their expert's weight, (E, O, I), or (E, I, O) if `across`."""
    ring = _ring_of(kernel, size, a, gather=False, bare=bias is None)
    if ring is None:
        return experts.run_rows(kernel, a, weight, bias, plan, size, across=across)
    from acmoe.ops.experts.hopper.launch import rows_by_ring

    return rows_by_ring(a, weight, plan, ring, across=across)


def run_hidden(
    upstream: Source,
    down: Tensor,
    h: Tensor,
    dh: Tensor,
    gate: Tensor,
    grad: Tensor,
    plan: Plan,
    size: Sizes,
    sums: Sums,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Shares]:
    """gate * a (N, F), and what is left for `run_finish`; writes dh (N, W), maybe over h.

    Either way one buffer of (N, F) is made: apart, gate * a is written over the gradient by a.
    """
    bare = not any(sums) and dropout == 0
    ring = _ring_of("hidden", size, upstream.values, gather=upstream.gather, bare=bare)
    if ring is not None:
        from acmoe.ops.experts.hopper.launch import hidden_by_ring

        a, share = hidden_by_ring(upstream.values, down, h, dh, gate, plan, ring)
        return a, Shares(share, share[:0])
    da = experts.run_rows(
        *("hidden", upstream.values, down, None, plan, size), across=True, gather=upstream.gather
    )
    shares = experts.run_activation(da, h, dh, gate, grad, plan, size, sums, dropout, seed)
    return da, shares


def run_weight(
    kernel: str, p: Tensor, q: Tensor, plan: Plan, size: Sizes, *, gather: str, dtype: torch.dtype
) -> Tensor:
    """(E, O, I) sums of outer products p^T q over each expert's rows.

    gather: "p" or "q" for the one that holds tokens, "none" where both hold rows. dtype: of the
    result, which is rounded once.
    """
    ring = _ring_of(kernel, size, p, gather=gather != "none", bare=True, result=dtype)
    if ring is None:
        return experts.run_weight(kernel, p, q, plan, size, gather=gather, dtype=dtype)
    from acmoe.ops.experts.hopper.launch import weights_by_ring, weights_of_tokens

    if gather == "none":
        return weights_by_ring(p, q, plan, ring)
    tokens, rows = (p, q) if gather == "p" else (q, p)
    return weights_of_tokens(tokens, rows, plan, ring, turned=gather == "q")
