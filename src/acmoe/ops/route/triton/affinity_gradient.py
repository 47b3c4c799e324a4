"""Gradient of the router's affinities, stored as a bf16x2 or bf16x3 split.

    d affinity (T, E)   from the gradients of the gate (T, K), of the affinities (T, E) and of the
                        gate sums (E,) of the balance loss

Each float32 gradient is stored as 2 or 3 bf16 parts whose sum is the number (ops/device/dot.py);
the GEMMs in backward.py read the parts as they are. Each program computes a block of tokens with
all experts, and also writes the sum of its block over tokens (the bias gradient before its last
reduction). Memory traffic: T E float32 read, 2 or 3 T E bf16 written.

T tokens, E experts, K experts per token, N token blocks, Z bf16 parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import split_bf16x3
from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
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
    num_parts: int,
) -> tuple[Tensor, Tensor]:
    """Return d affinity (Z, T, E) as bf16 parts, and its float32 sum over each token block (N, E).

    num_parts: Z, 2 for a bf16x2 split and 3 for a bf16x3 split.
    """
    T, E = affinity_TE.shape
    K = ids_TK.shape[1]
    experts = max(16, next_power_of_2(E))
    block = min(64, 4096 // experts)  # one program holds all experts of its tokens
    N = cdiv(T, block)
    grad_ZTE = affinity_TE.new_empty(num_parts, T, E, dtype=torch.bfloat16)
    partial_NE = affinity_TE.new_empty(N, E)
    upstream = [grad_gate_TK, grad_affinity_TE, grad_sum_E]
    pointers = [affinity_TE if grad is None else grad.contiguous() for grad in upstream]
    if T > 0:
        launch(
            _affinity_kernel, (N,), *pointers, ids_TK, gate_TK, affinity_TE,
            affinity_TE if mask_T is None else mask_T.contiguous().view(torch.uint8), grad_ZTE,
            partial_NE, T, 1.0 / temperature, E=E, K=K, SELECTED=over_selected,
            HAS_GATE=upstream[0] is not None, HAS_AFFINITY=upstream[1] is not None,
            HAS_SUM=upstream[2] is not None, HAS_MASK=mask_T is not None, BT=block, BE=experts,
            BK=max(2, next_power_of_2(K)), PARTS=num_parts, num_warps=4,
        )  # fmt: skip
    return grad_ZTE, partial_NE


def share_gradient(grad: Tensor, share_E: Tensor, num_tokens: int, weight: float) -> Tensor:
    """Return the gradient (E,) of the gate sums.

    grad: () gradient of the weighted balance loss. share_E: each expert's share of the routed rows.
    The rounding is that of autograd on a GPU,
    where torch divides by a number by multiplying with its inverse.
    """
    E = share_E.numel()
    out = torch.empty_like(share_E)
    launch(
        *(_share_kernel, (1,), grad, share_E, out, E, 1.0 / num_tokens, weight),
        BE=max(16, next_power_of_2(E)),
        num_warps=1,
    )
    return out


@triton.jit
def _share_kernel(grad_ptr, share_ptr, out_ptr, E, inverse, weight, BE: tl.constexpr):
    e = tl.arange(0, BE)
    share = tl.load(share_ptr + e, mask=e < E, other=0.0)
    tl.store(out_ptr + e, share * (tl.load(grad_ptr) * weight * E) * inverse, mask=e < E)


@triton.jit
def _affinity_kernel(
    grad_gate_ptr, grad_affinity_ptr, grad_sum_ptr, ids_ptr, gate_ptr, affinity_ptr, mask_ptr,
    out_ptr, partial_ptr, T, inverse_temperature, E: tl.constexpr, K: tl.constexpr,
    SELECTED: tl.constexpr, HAS_GATE: tl.constexpr, HAS_AFFINITY: tl.constexpr,
    HAS_SUM: tl.constexpr, HAS_MASK: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    unmasked = t < T
    if HAS_MASK:
        unmasked &= tl.load(mask_ptr + t, mask=unmasked, other=0) != 0
    valid = (t[:, None] < T) & (e[None, :] < E)
    offs = t.to(tl.int64)[:, None] * E + e[None, :]
    affinity = tl.load(affinity_ptr + offs, mask=valid, other=0.0)
    affinity = tl.where(e[None, :] < E, affinity, float("-inf"))
    grad = tl.zeros((BT, BE), dtype=tl.float32)
    if HAS_GATE:
        upstream = _gate_gradient(
            grad_gate_ptr, ids_ptr, gate_ptr, t, e, T, K, SELECTED, BT, BE, BK
        )
        if SELECTED:
            grad += upstream
        else:
            gate = softmax_rows(affinity)
            grad += gate * (upstream - tl.sum(gate * upstream, axis=1)[:, None])
    if HAS_SUM:
        upstream = tl.load(grad_sum_ptr + e, mask=e < E, other=0.0)[None, :]
        prob = softmax_rows(affinity * inverse_temperature)
        softmax_grad = (
            prob * (upstream - tl.sum(prob * upstream, axis=1)[:, None]) * inverse_temperature
        )
        grad += tl.where(unmasked[:, None], softmax_grad, 0.0)
    if HAS_AFFINITY:
        grad += tl.load(grad_affinity_ptr + offs, mask=valid, other=0.0)
    grad = tl.where(valid, grad, 0.0)
    high, middle, low = split_bf16x3(grad)
    size = (tl.full((), 0, dtype=tl.int64) + T) * E
    tl.store(out_ptr + offs, high, mask=valid)
    tl.store(out_ptr + size + offs, middle, mask=valid)
    if PARTS == 3:
        tl.store(out_ptr + 2 * size + offs, low, mask=valid)
    tl.store(partial_ptr + tl.program_id(0) * E + e, tl.sum(grad, axis=0), mask=e < E)


@triton.jit
def _gate_gradient(
    grad_ptr, ids_ptr, gate_ptr, t, e, T, K: tl.constexpr, SELECTED: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scatter the gate's gradient into a (BT, BE) tile, zero at experts that were not selected.

    SELECTED: the gate is a softmax over the K selected affinities, and the tile holds their
    gradient. Otherwise the tile holds the gradient of the gate, and the caller goes through the
    softmax.
    """
    row = t.to(tl.int64) * K
    k = tl.arange(0, BK)
    valid = (t[:, None] < T) & (k[None, :] < K)
    grad = tl.load(grad_ptr + row[:, None] + k[None, :], mask=valid, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] + k[None, :], mask=valid, other=0.0)
    mean = tl.sum(grad * gate, axis=1)
    scattered = tl.zeros((BT, BE), dtype=tl.float32)
    for i in range(0, K):
        expert = tl.load(ids_ptr + row + i, mask=t < T, other=-1)
        value = tl.load(grad_ptr + row + i, mask=t < T, other=0.0)
        if SELECTED:
            value = (value - mean) * tl.load(gate_ptr + row + i, mask=t < T, other=0.0)
        scattered += tl.where(e[None, :] == expert[:, None], value[:, None], 0.0)
    return scattered
