"""Which tile of which expert each program owns, worked out on the device: the host never waits.

N routed rows sorted by expert, E experts. A tile is BM consecutive rows of one expert; there are at
most N / BM + E of them, and that bound is what gets launched, or walked through by programs that
stay. Those left over, at least U / BM, cover the U rows for no expert, which stand last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEIGHTS = (16, 32, 64, 128, 256)  # of tiles; one launch makes the tables of all
_STEP = 1024  # rows a program finds the tokens of


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    return triton.cdiv(num_rows, block_m) + num_experts


@triton.jit
def tiles_before(end_ptr, expert, num_experts, height, BE: tl.constexpr):
    """Tiles of the experts before this one, tiles of its own, and its first row."""
    ids = tl.arange(0, BE)
    known = ids < num_experts
    end = tl.load(end_ptr + ids, mask=known, other=0)
    begin = tl.load(end_ptr + ids - 1, mask=known & (ids > 0), other=0)
    tiles = tl.where(known, (end - begin + height - 1) // height, 0).to(tl.int32)
    mine = tl.sum(tl.where(ids == expert, tiles, 0))
    first_row = tl.sum(tl.where(ids == expert, begin, 0)).to(tl.int32)
    return tl.sum(tl.where(ids < expert, tiles, 0)), mine, first_row


@triton.jit
def tile_of(pid, num_tiles, num_n, GROUP: tl.constexpr):
    """Row tile and column tile of a program: GROUP row tiles share the columns' weights in L2."""
    block = pid // (GROUP * num_n)
    height = tl.minimum(num_tiles - block * GROUP, GROUP)
    place = pid % (GROUP * num_n)
    return block * GROUP + place % height, place // height


@triton.jit
def first_column(tile, columns, WHOLE: tl.constexpr, BN: tl.constexpr):
    """WHOLE: there are columns for a tile, and the last one moves left to stay among them.

    What two tiles then compute, and write, is the same; and no access needs a mask, which for the
    columns of an accumulator costs up to 90 registers a thread.
    """
    first = tile * BN
    if WHOLE:
        first = tl.minimum(first, columns - BN)
    return first


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _plan_kernel(
    order_ptr,
    end_ptr,
    token_ptr,
    expert_ptr,
    start_ptr,
    live_ptr,
    num_rows,
    num_experts,
    top_k,
    num_tables,
    stride,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
    BE: tl.constexpr,
):
    """token (N,) of each row; and the tables, one program for an expert in each of them."""
    pid = tl.program_id(0)
    step = tl.arange(0, STEP)
    table = pid // num_experts
    if table >= num_tables:
        rows = (pid - num_tables * num_experts) * STEP + step
        order = tl.load(order_ptr + rows, mask=rows < num_rows, other=0).to(tl.int32)
        tl.store(token_ptr + rows, order // top_k, mask=rows < num_rows)
        return
    expert = pid % num_experts
    height = LOWEST << table
    base = table * stride
    before, mine, first_row = tiles_before(end_ptr, expert, num_experts, height, BE)
    if expert == num_experts - 1:  # the tiles left over stand behind its own
        tl.store(live_ptr + table, before + mine)
        last_row = tl.load(end_ptr + expert).to(tl.int32)
        left = tl.cdiv(num_rows, height) + num_experts - before - mine
        for i in range(0, left, STEP):
            at = base + before + mine + i + step
            tl.store(expert_ptr + at, tl.full([STEP], -1, tl.int32), mask=i + step < left)
            tl.store(start_ptr + at, last_row + (i + step) * height, mask=i + step < left)
    for i in range(0, mine, STEP):
        at = base + before + i + step
        inside = i + step < mine
        tl.store(expert_ptr + at, tl.full([STEP], 0, tl.int32) + expert, mask=inside)
        tl.store(start_ptr + at, first_row + (i + step) * height, mask=inside)


class Plan:
    """Of rows sorted by expert: the token of each, and tables of tiles by their height.

    plan[height]: (tiles,) int32 expert of each tile, -1 for none, and (tiles,) its first row.
    """

    def __init__(self, order_N: Tensor, end_E: Tensor, top_k: int) -> None:
        self.order, self.end, self.num_rows = order_N, end_E, order_N.numel()
        num_experts = end_E.shape[0]
        # Divided here once: in the inner loop of a kernel the division costs more than the load.
        self.token = torch.empty(self.num_rows, dtype=torch.int32, device=end_E.device)
        # A multiple of 16 bytes a table: Triton compiles once more for pointers that are not.
        stride = triton.cdiv(most_tiles(self.num_rows, num_experts, HEIGHTS[0]), 4) * 4
        shape = (2, len(HEIGHTS), stride)
        self.tables = torch.empty(shape, dtype=torch.int32, device=end_E.device)
        self._live = torch.empty(len(HEIGHTS), dtype=torch.int32, device=end_E.device)
        programs = len(HEIGHTS) * num_experts + triton.cdiv(self.num_rows, _STEP)
        _plan_kernel[(programs,)](
            *(order_N, end_E, self.token, *self.tables, self._live),
            *(self.num_rows, num_experts, top_k, len(HEIGHTS), stride),
            LOWEST=HEIGHTS[0],
            STEP=_STEP,
            BE=triton.next_power_of_2(num_experts),
            num_warps=4,
        )

    def __getitem__(self, height: int) -> tuple[Tensor, Tensor]:
        tiles = most_tiles(self.num_rows, self.end.shape[0], height)
        expert, start = self.tables[:, HEIGHTS.index(height), :tiles]
        return expert, start

    def live(self, height: int) -> Tensor:
        """(1,) int32 number of this height's tiles that are some expert's; they stand first."""
        at = HEIGHTS.index(height)
        return self._live[at : at + 1]
