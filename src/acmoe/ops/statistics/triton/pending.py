"""Merge a batch into the pending statistics of the next optimizer step.

    total = count + new_count                               (C,)
    mean  = mean + (new - mean) * new_count / total         (C, D); new itself where count is 0

ops/statistics/pending.py holds the specification. The kernels that measure a batch call
`merge_batch` themselves (epilogue.py); for other statistics it takes one launch of one program per
cluster. Memory traffic: 2 C D float32 read, C D written.

C clusters, D statistics of each.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import launch, next_power_of_2


def add_batch(
    mean_CD: Tensor, count_C: Tensor, new_CD: Tensor, new_count_C: Tensor, least: int
) -> None:
    """Update mean and count in place; all tensors are contiguous float32."""
    C, D = mean_CD.shape
    width = max(16, next_power_of_2(D))
    launch(
        *(_add_batch_kernel, (C,), mean_CD, count_C, new_CD, new_count_C, D, least),
        BD=width,
        num_warps=8 if width > 2048 else 4,
    )


@triton.jit
def _add_batch_kernel(
    mean_ptr, count_ptr, new_ptr, new_count_ptr, D, least,
    BD: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    new = tl.load(new_ptr + c * D + d, mask=d < D, other=0.0)
    pending = load_pending(mean_ptr, count_ptr, c, d, D)
    finite = tl.max(tl.where(tl.abs(new) < float("inf"), 0, 1)) == 0
    new_count = tl.load(new_count_ptr + c)
    accept = (new_count >= least) & finite
    merge_batch(mean_ptr, count_ptr, pending, new, new_count, accept, c, d, D)


@triton.jit
def load_pending(mean_ptr, count_ptr, row, d, D):
    """Return the pending means of a cluster, for features d, and their count."""
    return tl.load(mean_ptr + row * D + d, mask=d < D, other=0.0), tl.load(count_ptr + row)


@triton.jit
def merge_batch(mean_ptr, count_ptr, pending, new, new_count, accept, row, d, D):
    """Merge the float32 statistics `new` of a cluster's `new_count` tokens; d: all features.

    pending: the result of `load_pending`. accept: False for too few tokens, and for statistics that
    are not finite: they change nothing.
    """
    mean_ptr += row * D + d
    count_ptr += row
    mean, count = pending
    tl.debug_barrier()  # every warp has read the count before it is written below
    total = count + new_count
    share = new_count / tl.where(total >= 1, total, 1.0)
    merged = tl.where(count == 0, new, mean + (new - mean) * share)
    tl.store(mean_ptr, tl.where(accept, merged, mean), mask=d < D)
    tl.store(count_ptr, tl.where(accept, total, count))
