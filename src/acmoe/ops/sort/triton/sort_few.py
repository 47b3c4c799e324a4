"""Sort a few routed rows by expert in one launch, by comparing every row with every other one.

The sorted position of row i is the number of rows that go before it: those of a lower expert, and
earlier ones of the same expert. It depends on no other program, so that there is neither a
histogram nor a second launch; N * (N + E) comparisons take less time than a launch up to several
thousand rows. sort.py sorts more.

N rows, E experts; the id E means "no expert" and sorts last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

# Rows, or experts, of a program; rows that they are compared with at a time; warps.
_ROWS, _OTHERS, _WARPS = 16, 1024, 4


def sort_few(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return permutation, inverse, offsets and expert of a few rows by one launch."""
    N = ids.numel()
    offsets = torch.empty(num_experts, dtype=torch.int64, device=ids.device)
    permutation, inverse, expert = offsets.new_empty(N), offsets.new_empty(N), offsets.new_empty(N)
    row_blocks = cdiv(N, _ROWS)
    launch(
        *(_sort_few_kernel, (row_blocks + cdiv(num_experts, _ROWS),)),
        *(ids, permutation, inverse, expert, offsets, N, num_experts, row_blocks),
        R=_ROWS,
        BN=min(_OTHERS, max(128, next_power_of_2(N))),
        num_warps=_WARPS,
    )
    return permutation, inverse, offsets, expert


@triton.jit
def _order(ids_ptr, rows, N, E):
    """Return ids and keys (R,) of rows; rows sort by their keys. A row beyond N has the highest."""
    ids = tl.load(ids_ptr + rows, mask=rows < N, other=0).to(tl.int32)
    bins = tl.where((ids >= 0) & (ids < E), ids, E)
    return ids, tl.where(rows < N, bins * N + rows, 0x7FFFFFFF)


@triton.jit(do_not_specialize=["N", "row_blocks"])
def _sort_few_kernel(
    ids_ptr, permutation_ptr, inverse_ptr, expert_ptr, offsets_ptr, N, E, row_blocks,
    R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the positions of R rows or, in the programs after row_blocks, the end of R experts.

    Both are numbers of keys below a limit: below the row's own key, or below the first possible
    key of the next expert.
    """
    block = tl.program_id(0)
    rows = block * R + tl.arange(0, R)
    experts = (block - row_blocks) * R + tl.arange(0, R)
    ids, own = _order(ids_ptr, rows, N, E)
    limit = tl.where(block < row_blocks, own, (experts + 1) * N)
    before = tl.zeros((R,), dtype=tl.int32)
    for start in range(0, N, BN):
        _, key = _order(ids_ptr, start + tl.arange(0, BN), N, E)
        before += tl.sum((key[None, :] < limit[:, None]).to(tl.int32), axis=1)
    if block < row_blocks:
        inside = rows < N
        tl.store(permutation_ptr + before, rows.to(tl.int64), mask=inside)
        tl.store(inverse_ptr + rows, before.to(tl.int64), mask=inside)
        tl.store(expert_ptr + before, ids.to(tl.int64), mask=inside)
    else:
        tl.store(offsets_ptr + experts, before.to(tl.int64), mask=experts < E)
