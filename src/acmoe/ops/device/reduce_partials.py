"""Add up the partial results that the programs of a launch wrote: out[g] (M,) = sum of (N, M).

partial (G, N, M) float32 holds G reductions over N partial vectors of M columns. A program adds up
all N partials of BM columns of one g, in a fixed order, so that equal inputs give equal bits (no
atomics). It reads G * N * M float32, the lower bound.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

STEP = 2048  # elements that a program loads at a time, unless many partials need more
COLUMNS = 8  # the least columns of a program: 32 bytes, a sector of memory
_MAX_ROWS = 1024  # partials loaded at a time, so that a long sum waits for memory a few times only


def reduce_partials(partial_GNM: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return the G sums (M,) of partial (G, N, M), each in a tensor of its own; G is 1 or 2.

    The sums are rounded to `dtype`.
    """
    G, N, M = partial_GNM.shape
    rows = min(_MAX_ROWS, max(16, next_power_of_2(max(N, 1))))
    columns = max(COLUMNS, STEP // rows)
    out = [partial_GNM.new_empty(M, dtype=dtype) for _ in range(G)]
    launch(
        *(_reduce_kernel, (cdiv(M, columns), G)),
        *(partial_GNM, out[0], out[-1], N, M),
        BN=rows,
        BM=columns,
        num_warps=8 if rows * columns > STEP else 4,
    )
    return tuple(out)


def reduce_balance(
    partial_2NE: Tensor, num_tokens: int, weight: float, share_E: Tensor | None = None
) -> Tensor:
    """Return the balance loss () of a router's partial gate sums and loads, times a weight.

    The loss is E * sum_e load_e / sum(load) * gate_e / tokens, 1 at balance. One program adds up.
    share_E: a float32 buffer for load_e / sum(load), which the derivative by the gate sums takes.
    """
    _, N, E = partial_2NE.shape
    loss = partial_2NE.new_empty(())
    experts = max(16, next_power_of_2(E))
    launch(
        *(_balance_kernel, (1,), partial_2NE, loss, loss if share_E is None else share_E),
        *(N, E, num_tokens, weight),
        HAS_SHARE=share_E is not None,
        BN=max(1, STEP // experts),
        BE=experts,
        num_warps=4,
    )
    return loss


@triton.jit(do_not_specialize=["N", "num_tokens"])
def _balance_kernel(
    partial_ptr, loss_ptr, share_ptr, N, E, num_tokens, weight, HAS_SHARE: tl.constexpr,
    BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write the weighted loss of the gate sums and loads, each summed over N, and the shares."""
    e = tl.arange(0, BE)
    gates = tl.zeros((BN, BE), dtype=tl.float32)
    loads = tl.zeros((BN, BE), dtype=tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        mask = (n[:, None] < N) & (e[None, :] < E)
        at = n.to(tl.int64)[:, None] * E + e[None, :]
        gates += tl.load(partial_ptr + at, mask=mask, other=0.0)
        loads += tl.load(partial_ptr + N.to(tl.int64) * E + at, mask=mask, other=0.0)
    gate, load = tl.sum(gates, axis=0), tl.sum(loads, axis=0)
    share = load / tl.maximum(tl.sum(load), 1.0)
    tl.store(loss_ptr, weight * (E * tl.sum(share * (gate / num_tokens))))
    if HAS_SHARE:
        tl.store(share_ptr + e, tl.div_rn(load, tl.maximum(tl.sum(load), 1.0)), mask=e < E)


@triton.jit
def _reduce_kernel(
    partial_ptr, first_ptr, second_ptr, N, M, BN: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Write to first_ptr, or for g = 1 to second_ptr, the sum over N of columns m of partial[g]."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    partial_ptr += tl.program_id(1).to(tl.int64) * N * M
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        mask = (n[:, None] < N) & (m[None, :] < M)
        at = n.to(tl.int64)[:, None] * M + m[None, :]
        acc += tl.load(partial_ptr + at, mask=mask, other=0.0)
    out_ptr = first_ptr if tl.program_id(1) == 0 else second_ptr
    tl.store(out_ptr + m, tl.sum(acc, axis=0), mask=m < M)
