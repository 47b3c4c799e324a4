"""Sort routed rows by expert: a stable counting sort in three launches, without atomics.

    count    how many rows of each block go to each expert
    offset   one program an expert: a running sum of its counts over blocks
    place    a row's place: its expert's first one, its block's offset there, its rank in the block

N rows, E experts; the id E is "no expert" and stands last. Bytes: two reads of N ids, four writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count_kernel(
    ids_ptr, count_ptr, num_rows, num_experts, num_blocks, R: tl.constexpr, BE: tl.constexpr
):
    block = tl.program_id(0)
    rows = block * R + tl.arange(0, R)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    bins = tl.arange(0, BE)
    hits = (ids[:, None] == bins[None, :]).to(tl.int32)
    count = tl.sum(hits, axis=0)
    tl.store(count_ptr + bins * num_blocks + block, count, mask=bins < num_experts)


@triton.jit
def _offset_kernel(count_ptr, offset_ptr, total_ptr, num_blocks, BB: tl.constexpr):
    expert = tl.program_id(0)
    reached = 0
    for start in range(0, num_blocks, BB):
        at = start + tl.arange(0, BB)
        inside = at < num_blocks
        count = tl.load(count_ptr + expert * num_blocks + at, mask=inside, other=0)
        running = tl.cumsum(count, axis=0)
        tl.store(offset_ptr + expert * num_blocks + at, reached + running - count, mask=inside)
        reached += tl.sum(count)
    tl.store(total_ptr + expert, reached)


@triton.jit
def _place_kernel(
    ids_ptr,
    offset_ptr,
    total_ptr,
    end_ptr,
    order_ptr,
    back_ptr,
    token_ptr,
    expert_ptr,
    num_rows,
    num_experts,
    num_blocks,
    top_k,
    R: tl.constexpr,
    BE: tl.constexpr,
):
    block = tl.program_id(0)
    rows = block * R + tl.arange(0, R)
    inside = rows < num_rows
    ids = tl.load(ids_ptr + rows, mask=inside, other=-1).to(tl.int32)
    bins = tl.arange(0, BE)
    known = bins < num_experts
    hits = ((ids[:, None] == bins[None, :]) & known[None, :]).to(tl.int32)
    rank = tl.cumsum(hits, axis=0) - hits
    total = tl.load(total_ptr + bins, mask=known, other=0)
    end = tl.cumsum(total, axis=0)
    if block == 0:
        tl.store(end_ptr + bins, end.to(tl.int64), mask=known)
    earlier = tl.load(offset_ptr + bins * num_blocks + block, mask=known, other=0)
    first = end - total + earlier
    place = tl.sum(tl.where(hits > 0, rank + first[None, :], 0), axis=1)
    # Rows for no expert follow the last expert, in order: those before them that have none.
    served = tl.sum(hits, axis=1)
    served_before = tl.cumsum(served, axis=0) - served + tl.sum(earlier)
    place = tl.where(served > 0, place, tl.sum(total) + rows - served_before)
    tl.store(order_ptr + place, rows.to(tl.int64), mask=inside)
    tl.store(back_ptr + rows, place.to(tl.int64), mask=inside)
    tl.store(token_ptr + place, rows // top_k, mask=inside)
    tl.store(expert_ptr + place, ids.to(tl.int64), mask=inside)


def sort_rows(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """order, back, end, expert (as experts/dispatch.py) and token, int32, of each sorted row."""
    ids = expert_ids_TK.reshape(-1)
    N, top_k = ids.numel(), expert_ids_TK.shape[-1] if expert_ids_TK.dim() > 1 else 1
    device = ids.device
    width = max(16, triton.next_power_of_2(num_experts))
    rows = max(16, min(256, 16384 // width))
    blocks = max(1, triton.cdiv(N, rows))
    count = torch.empty(num_experts, blocks, dtype=torch.int32, device=device)
    offset = torch.empty_like(count)
    total = torch.empty(num_experts, dtype=torch.int32, device=device)
    end = torch.empty(num_experts, dtype=torch.int64, device=device)
    order, back, expert = (torch.empty(N, dtype=torch.int64, device=device) for _ in range(3))
    token = torch.empty(N, dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](ids, count, N, num_experts, blocks, R=rows, BE=width, num_warps=4)
    _offset_kernel[(num_experts,)](count, offset, total, blocks, BB=1024, num_warps=4)
    _place_kernel[(blocks,)](
        *(ids, offset, total, end, order, back, token, expert, N, num_experts, blocks, top_k),
        R=rows,
        BE=width,
        num_warps=4,
    )
    return order, back, end, expert, token
