"""Sort a few routed rows by expert with one program of one launch; sort.py sorts more.

N rows, E experts; the id E means "no expert" and sorts last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import launch


def sort_few(
    ids: Tensor, num_experts: int, rows: int, num_bins: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return permutation, inverse, offsets and expert of a few rows by one launch."""
    N = ids.numel()
    offsets = torch.empty(num_experts, dtype=torch.int64, device=ids.device)
    permutation, inverse, expert = offsets.new_empty(N), offsets.new_empty(N), offsets.new_empty(N)
    launch(
        *(_sort_few_kernel, (1,), ids, permutation, inverse, expert, offsets, N, num_experts),
        R=rows,
        BE=num_bins,
        num_warps=4,
    )
    return permutation, inverse, offsets, expert


@triton.jit(do_not_specialize=["N"])
def _sort_few_kernel(
    ids_ptr, permutation_ptr, inverse_ptr, expert_ptr, offsets_ptr, N, E, R: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Write the results of `sort_rows` in one program: count all blocks of R rows, then place."""
    i = tl.arange(0, R)
    bins = tl.arange(0, BE)
    total = tl.zeros((BE,), dtype=tl.int32)
    for start in range(0, N, R):
        ids = tl.load(ids_ptr + start + i, mask=start + i < N, other=-1).to(tl.int32)
        total += tl.sum((ids[:, None] == bins[None, :]).to(tl.int32), axis=0)
    total = tl.where(bins < E, total, 0)
    end = tl.cumsum(total, axis=0)
    tl.store(offsets_ptr + bins, end.to(tl.int64), mask=bins < E)
    following = end - total  # the position of each expert's next row
    last = tl.sum(total)  # that of the next row without an expert
    for start in range(0, N, R):
        rows = start + i
        ids = tl.load(ids_ptr + rows, mask=rows < N, other=-1).to(tl.int32)
        bin_id = tl.where((ids >= 0) & (ids < E), ids, -1)
        first = tl.where(bin_id >= 0, tl.gather(following, tl.maximum(bin_id, 0), 0), last)
        same_earlier = (bin_id[:, None] == bin_id[None, :]) & (i[:, None] < i[None, :])
        position = first + tl.sum(same_earlier.to(tl.int32), axis=0)
        tl.store(permutation_ptr + position, rows.to(tl.int64), mask=rows < N)
        tl.store(inverse_ptr + rows, position.to(tl.int64), mask=rows < N)
        tl.store(expert_ptr + position, ids.to(tl.int64), mask=rows < N)
        following += tl.sum((bin_id[:, None] == bins[None, :]).to(tl.int32), axis=0)
        last += tl.sum((bin_id < 0).to(tl.int32))
