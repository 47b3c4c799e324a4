"""The gradient of a router's affinities, written as its products take it.

    d affinity    from the gate, the summed gates of the balance loss and the affinities
It is cut into 2 or 3 bf16 pieces here (ops/device/dot.py), which backward.py
multiplies. Floor: T E float32 read, 2 or 3 T E bf16 written.

T tokens, E experts, K experts per token, N token blocks, Z pieces.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import in_three
from acmoe.ops.route.triton.route import softmax_rows


def affinity_gradient(
    grad_gate_TK: Tensor | None,
    grad_affinity_TE: Tensor | None,
    grad_sum_E: Tensor | None,
    ids_TK: Tensor,
    gate_TK: Tensor,
    affinity_TE: Tensor,
    mask_T: Tensor | None,
    over_selected: bool,
    temperature: float,
    num_pieces: int,
) -> tuple[Tensor, Tensor]:
    """d affinity (Z, T, E) in bf16 pieces, and what its blocks sum to over their tokens (N, E)."""
    T, E = affinity_TE.shape
    K = ids_TK.shape[1]
    experts = max(16, triton.next_power_of_2(E))
    block = min(64, 4096 // experts)  # one program sees all experts of its tokens
    N = triton.cdiv(T, block)
    grad_ZTE = affinity_TE.new_empty(num_pieces, T, E, dtype=torch.bfloat16)
    partial_NE = affinity_TE.new_empty(N, E)
    given = [grad_gate_TK, grad_affinity_TE, grad_sum_E]
    pointers = [affinity_TE if grad is None else grad.contiguous() for grad in given]
    if T > 0:
        _affinity_kernel[(N,)](
            *pointers, ids_TK, gate_TK, affinity_TE,
            affinity_TE if mask_T is None else mask_T.contiguous().view(torch.uint8), grad_ZTE,
            partial_NE, T, E, 1.0 / temperature, K=K, SELECTED=over_selected,
            HAS_GATE=given[0] is not None, HAS_AFFINITY=given[1] is not None,
            HAS_SUM=given[2] is not None, HAS_MASK=mask_T is not None, BT=block, BE=experts,
            BK=max(2, triton.next_power_of_2(K)), PIECES=num_pieces, num_warps=4,
        )  # fmt: skip
    return grad_ZTE, partial_NE


@triton.jit
def _affinity_kernel(
    grad_gate_ptr, grad_affinity_ptr, grad_sum_ptr, ids_ptr, gate_ptr, affinity_ptr, mask_ptr,
    out_ptr, partial_ptr, T, E, inverse_temperature, K: tl.constexpr, SELECTED: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_AFFINITY: tl.constexpr, HAS_SUM: tl.constexpr,
    HAS_MASK: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    kept = t < T
    if HAS_MASK:
        kept &= tl.load(mask_ptr + t, mask=kept, other=0) != 0
    known = (t[:, None] < T) & (e[None, :] < E)
    at = t.to(tl.int64)[:, None] * E + e[None, :]
    affinity = tl.load(affinity_ptr + at, mask=known, other=0.0)
    affinity = tl.where(e[None, :] < E, affinity, float("-inf"))
    grad = tl.zeros((BT, BE), dtype=tl.float32)
    if HAS_GATE:
        wanted = _gate_gradient(grad_gate_ptr, ids_ptr, gate_ptr, t, e, T, K, SELECTED, BT, BE, BK)
        if SELECTED:
            grad += wanted
        else:
            gate = softmax_rows(affinity)
            grad += gate * (wanted - tl.sum(gate * wanted, axis=1)[:, None])
    if HAS_SUM:
        wanted = tl.load(grad_sum_ptr + e, mask=e < E, other=0.0)[None, :]
        share = softmax_rows(affinity * inverse_temperature)
        slope = share * (wanted - tl.sum(share * wanted, axis=1)[:, None]) * inverse_temperature
        grad += tl.where(kept[:, None], slope, 0.0)
    if HAS_AFFINITY:
        grad += tl.load(grad_affinity_ptr + at, mask=known, other=0.0)
    grad = tl.where(known, grad, 0.0)
    high, middle, low = in_three(grad)
    size = (tl.full((), 0, dtype=tl.int64) + T) * E
    tl.store(out_ptr + at, high, mask=known)
    tl.store(out_ptr + size + at, middle, mask=known)
    if PIECES == 3:
        tl.store(out_ptr + 2 * size + at, low, mask=known)
    tl.store(partial_ptr + tl.program_id(0) * E + e, tl.sum(grad, axis=0), mask=e < E)


@triton.jit
def _gate_gradient(
    grad_ptr, ids_ptr, gate_ptr, t, e, T, K: tl.constexpr, SELECTED: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(BT, BE): at each chosen expert the gradient of its affinity (SELECTED) or of its gate."""
    row = t.to(tl.int64) * K
    k = tl.arange(0, BK)
    known = (t[:, None] < T) & (k[None, :] < K)
    grad = tl.load(grad_ptr + row[:, None] + k[None, :], mask=known, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] + k[None, :], mask=known, other=0.0)
    mean = tl.sum(grad * gate, axis=1)
    spread = tl.zeros((BT, BE), dtype=tl.float32)
    for i in range(0, K):
        expert = tl.load(ids_ptr + row + i, mask=t < T, other=-1)
        value = tl.load(grad_ptr + row + i, mask=t < T, other=0.0)
        if SELECTED:
            value = (value - mean) * tl.load(gate_ptr + row + i, mask=t < T, other=0.0)
        spread += tl.where(e[None, :] == expert[:, None], value[:, None], 0.0)
    return spread
