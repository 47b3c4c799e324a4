"""Rows of tokens in the scales of many sets, in one launch: the Triton form of ../set_rows.py."""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch

_BLOCK = 256


def launch_set_rows(cluster_T: Tensor, num_sets: int, num_clusters: int) -> Tensor:
    """Return the row (T,) of each token in scales (B * C, D); -1 for a token in no cluster."""
    T, row_T = cluster_T.numel(), cluster_T.new_empty(cluster_T.shape)
    launch(
        _rows_kernel, (cdiv(T, _BLOCK),), cluster_T, row_T, cluster_T.stride(0), T, T // num_sets,
        num_clusters, BT=_BLOCK, num_warps=4,
    )  # fmt: skip
    return row_T


@triton.jit
def _rows_kernel(cluster_ptr, row_ptr, stride, T, L, C, BT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    cluster = tl.load(cluster_ptr + t * stride, mask=t < T, other=-1)
    tl.store(row_ptr + t, tl.where(cluster < 0, -1, t // L * C + cluster), mask=t < T)
