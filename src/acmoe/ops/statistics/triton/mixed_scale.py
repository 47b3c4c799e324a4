"""Weighted sums of scales for tokens that read several clusters: the Triton form of
../mixed_scale.py.

Each number is written once, 4 T D bytes; the (C, D) scales come from L2.

T tokens, D features, C clusters, J clusters read by each token.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

_TOKENS, _FEATURES = 8, 256  # most of a program


def launch_mixed_scale(scale_CD: Tensor, assignment_TJ: Tensor, membership_TJ: Tensor) -> Tensor:
    """Return the diagonals (T, D) of contiguous tensors."""
    (T, J), (C, D) = assignment_TJ.shape, scale_CD.shape
    out_TD = scale_CD.new_empty(T, D)
    features = min(_FEATURES, next_power_of_2(D))
    launch(
        _mix_kernel, (cdiv(T, _TOKENS), cdiv(D, features)), scale_CD, assignment_TJ, membership_TJ,
        out_TD, T, D, C, J=J, BT=_TOKENS, BD=features, num_warps=4,
    )  # fmt: skip
    return out_TD


@triton.jit
def _mix_kernel(
    scale_ptr, assignment_ptr, membership_ptr, out_ptr, T, D, C, J: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Write the diagonals of BT tokens at BD features."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BT, BD), dtype=tl.float32)
    for j in tl.static_range(J):
        cluster = tl.load(assignment_ptr + t * J + j, mask=t < T, other=-1)
        share = tl.load(membership_ptr + t * J + j, mask=t < T, other=0.0).to(tl.float32)
        known = ((cluster >= 0) & (cluster < C))[:, None] & (d[None, :] < D)
        scale = tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=known, other=1.0)
        acc += share[:, None] * scale
    tl.store(out_ptr + t[:, None] * D + d[None, :], acc, mask=(t < T)[:, None] & (d[None, :] < D))
