"""Which tile of which expert each program owns, worked out on the device: the host never waits.

N routed rows sorted by expert, E experts. A tile is BM consecutive rows of one expert; there are at
most N / BM + E of them, and that bound is what gets launched.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    return triton.cdiv(num_rows, block_m) + num_experts


@triton.jit
def _tile_kernel(
    end_ptr, expert_ptr, start_ptr, num_experts, most, BM: tl.constexpr, BE: tl.constexpr
):
    expert = tl.program_id(0)
    ids = tl.arange(0, BE)
    known = ids < num_experts
    end = tl.load(end_ptr + ids, mask=known, other=0)
    begin = tl.load(end_ptr + ids - 1, mask=known & (ids > 0), other=0)
    tiles = tl.where(known, (end - begin + BM - 1) // BM, 0)
    mine = tl.sum(tl.where(ids == expert, tiles, 0))
    first_row = tl.sum(tl.where(ids == expert, begin, 0))
    base = tl.sum(tl.where(ids < expert, tiles, 0))
    step = tl.arange(0, BE)
    for i in range(0, mine, BE):
        inside = i + step < mine
        tl.store(expert_ptr + base + i + step, tl.full([BE], 0, tl.int32) + expert, mask=inside)
        tl.store(
            start_ptr + base + i + step, (first_row + (i + step) * BM).to(tl.int32), mask=inside
        )
    if expert == num_experts - 1:  # the places behind the last tile belong to nobody
        used = base + mine
        for i in range(0, most - used, BE):
            inside = i + step < most - used
            tl.store(expert_ptr + used + i + step, tl.full([BE], -1, tl.int32), mask=inside)


def tile_table(end_E: Tensor, num_rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """(tiles,) int32 expert of each tile, -1 for none, and its first row."""
    num_experts = end_E.shape[0]
    most = most_tiles(num_rows, num_experts, block_m)
    expert = torch.empty(most, dtype=torch.int32, device=end_E.device)
    start = torch.empty(most, dtype=torch.int32, device=end_E.device)
    width = triton.next_power_of_2(num_experts)
    _tile_kernel[(num_experts,)](
        end_E, expert, start, num_experts, most, BM=block_m, BE=width, num_warps=1
    )
    return expert, start
