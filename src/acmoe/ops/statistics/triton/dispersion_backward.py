"""Gradient of a dispersion with respect to the tokens (B, T, D).

With m the mean of a token's cluster, n its size and g the gradient of its dispersion:
    mad        d x = g / n * (sign(x - m) - mean of the cluster's signs)
    variance   d x = g / n * 2 (x - m)
The mean of the signs comes from `partial_sums` with measure "sign" (dispersion.py). Each program
owns a block of tokens and a block of features. Memory traffic: x read once, its gradient written
once, 2 B T D itemsize bytes.

B sets of T tokens, D features, C clusters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.statistics.triton.dispersion import load_cluster

TOKENS, FEATURES, WARPS = 32, 128, 4


def deviation_gradient(
    x_BTD: Tensor,
    assignment_BT: Tensor,
    mask_BT: Tensor | None,
    mean_BCD: Tensor,
    weight_BCD: Tensor,
    sign_BCD: Tensor | None,
) -> Tensor:
    """Return weight * (sign(x - mean) - sign_BCD), or weight * (x - mean) if sign_BCD is None."""
    B, T, D = x_BTD.shape
    x_BTD, assignment_BT = x_BTD.contiguous(), assignment_BT.contiguous()
    mask = assignment_BT if mask_BT is None else mask_BT.contiguous().view(torch.uint8)
    grad_BTD = torch.empty_like(x_BTD)
    if x_BTD.numel() == 0:
        return grad_BTD
    _gradient_kernel[(triton.cdiv(B * T, TOKENS), triton.cdiv(D, FEATURES))](
        x_BTD, assignment_BT, mask, mean_BCD, weight_BCD.contiguous(),
        weight_BCD if sign_BCD is None else sign_BCD.contiguous(), grad_BTD, B * T, T, D,
        mean_BCD.shape[1], HAS_MASK=mask_BT is not None, SIGN=sign_BCD is not None, BT=TOKENS,
        BD=FEATURES, num_warps=WARPS,
    )  # fmt: skip
    return grad_BTD


@triton.jit
def _gradient_kernel(
    x_ptr, assignment_ptr, mask_ptr, mean_ptr, weight_ptr, sign_ptr, grad_ptr, rows, T, D, C,
    HAS_MASK: tl.constexpr, SIGN: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    cluster = load_cluster(assignment_ptr, mask_ptr, row, row < rows, HAS_MASK)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    valid = inside & ((cluster >= 0) & (cluster < C))[:, None]
    offs = row[:, None] * D + d[None, :]
    cluster_offs = (row // T * C + cluster)[:, None] * D + d[None, :]
    x = tl.load(x_ptr + offs, mask=valid, other=0.0).to(tl.float32)
    deviation = x - tl.load(mean_ptr + cluster_offs, mask=valid, other=0.0)
    weight = tl.load(weight_ptr + cluster_offs, mask=valid, other=0.0)
    if SIGN:
        deviation = (deviation > 0).to(tl.float32) - (deviation < 0).to(tl.float32)
        deviation -= tl.load(sign_ptr + cluster_offs, mask=valid, other=0.0)
    # A weight of 0 marks a cluster without a gradient; its tokens may hold inf or NaN.
    grad = tl.where(weight != 0, weight * deviation, 0.0)
    tl.store(grad_ptr + offs, grad.to(grad_ptr.dtype.element_ty), mask=inside)
