"""Tile scheduler of the grouped GEMMs: map each row tile to its expert, on the device.

N routed rows are sorted by expert; offsets (E,) holds the end of each expert's rows, and U rows
that were routed to no expert come last. A row tile is BM consecutive rows of one expert. The number
of tiles depends on the routing, which the host does not know without a synchronisation, so launches
use the upper bound ceil(N / BM) + E: as a grid with one program a tile, or as the table that a
persistent kernel iterates over. The unused entries of the table, at least U / BM, are marked with
expert -1 and cover the U rows.

`_plan_kernel` writes the tables for every tile height in one launch: one program for each expert
and height, and one for each chunk of 1024 rows, which writes the token of each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

HEIGHTS = (16, 32, 64, 128, 256)  # tile heights BM; one launch writes the tables for all of them
# Row tiles of an average expert up to which, and size of its weights in bytes from which, no group
# has tiles of two experts (`row_tile`). Measured on an H200, whose L2 cache has 50 MB, with weights
# of 16 to 400 MB: with 1 tile a layer takes 6.3% less time (scout), with 2 or 4 tiles 0.2 to 3%
# less, with 8 as long or 0.5% more. With weights of 2 to 8 MB it takes up to 2.9% more.
BY_EXPERT_UP_TO, BY_EXPERT_WEIGHTS = 6, 12 * 2**20
_CHUNK = 1024  # rows, or table entries, that a program handles at a time


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return the upper bound on the number of row tiles of this height."""
    return cdiv(num_rows, block_m) + num_experts


@triton.jit
def tiles_before(offsets_ptr, expert, num_experts, height, BE: tl.constexpr):
    """Return the number of tiles of earlier experts, of this expert, and its first row."""
    ids = tl.arange(0, BE)
    valid = ids < num_experts
    end = tl.load(offsets_ptr + ids, mask=valid, other=0)
    begin = tl.load(offsets_ptr + ids - 1, mask=valid & (ids > 0), other=0)
    tiles = tl.where(valid, (end - begin + height - 1) // height, 0).to(tl.int32)
    num_own = tl.sum(tl.where(ids == expert, tiles, 0))
    first_row = tl.sum(tl.where(ids == expert, begin, 0)).to(tl.int32)
    return tl.sum(tl.where(ids < expert, tiles, 0)), num_own, first_row


@triton.jit
def tile_coords(pid, num_tiles, num_n, GROUP_M: tl.constexpr):
    """Return (row tile, column tile) of the linear index pid in grouped order.

    GROUP_M row tiles iterate over the columns together, so that they share the weights in L2.
    """
    group = pid // (GROUP_M * num_n)
    height = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
    local = pid % (GROUP_M * num_n)
    return group * GROUP_M + local % height, local // height


@triton.jit
def row_tile(
    tile_id, tile_expert_ptr, tile_start_ptr, offsets_ptr, num_tiles, num_n, GROUP_M: tl.constexpr,
    BY_EXPERT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return expert (-1: unused), first row, end of the expert's rows, and column tile of an index.

    The tiles are in grouped order (`tile_coords`). BY_EXPERT: up to GROUP_M tiles of one expert are
    a group, and all groups of an expert have nearly as many tiles. An expert's weights are read
    from memory once for each of its groups, and no group cuts the few tiles of an expert in two.
    """
    if BY_EXPERT:
        some_tile = tile_id // num_n  # a row tile of the same expert
        expert = tl.load(tile_expert_ptr + some_tile)
        some_row = tl.load(tile_start_ptr + some_tile)
        begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int32)
        end = tl.load(offsets_ptr + expert, mask=expert >= 0, other=0).to(tl.int32)
        num_own = tl.maximum(tl.cdiv(end - begin, BM), 1)
        group_m = tl.cdiv(num_own, tl.cdiv(num_own, GROUP_M))
        own_id = tile_id - (some_tile - (some_row - begin) // BM) * num_n
        group = own_id // (group_m * num_n)
        # At least 1 for unused tiles too, which may not divide by zero.
        height = tl.maximum(tl.minimum(num_own - group * group_m, group_m), 1)
        local = own_id % (group_m * num_n)
        start_row, n_tile = begin + (group * group_m + local % height) * BM, local // height
    else:
        m_tile, n_tile = tile_coords(tile_id, num_tiles, num_n, GROUP_M)
        expert = tl.load(tile_expert_ptr + m_tile)
        start_row = tl.load(tile_start_ptr + m_tile)
        end = tl.load(offsets_ptr + expert, mask=expert >= 0, other=0).to(tl.int32)
    return expert, start_row, end, n_tile


@triton.jit
def first_column(n_tile, columns, SHIFT_EDGE: tl.constexpr, BN: tl.constexpr):
    """Return the first column of a tile of BN columns.

    SHIFT_EDGE (requires columns >= BN) shifts the last tile left until it ends at the last column.
    The columns in the overlap are computed twice and written twice with equal values. In exchange
    no access needs a column mask, which costs up to 90 registers a thread for an accumulator.
    """
    first_col = n_tile * BN
    if SHIFT_EDGE:
        first_col = tl.minimum(first_col, columns - BN)
    return first_col


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _plan_kernel(
    permutation_ptr,
    offsets_ptr,
    token_ptr,
    expert_ptr,
    start_ptr,
    num_used_ptr,
    num_rows,
    num_experts,
    top_k,
    num_tables,
    stride,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
    BE: tl.constexpr,
):
    """Write token (N,) = permutation // top_k, and for each tile height (table) the tile tables.

    Program pid < num_tables * num_experts writes the entries of one expert in one table; the last
    expert's program also writes the unused entries, the number of used ones, and a zero after the
    numbers of all tables (`Plan.counter`). The remaining programs write token, CHUNK rows each.
    """
    pid = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    table = pid // num_experts
    if table >= num_tables:
        rows = (pid - num_tables * num_experts) * CHUNK + chunk
        choice = tl.load(permutation_ptr + rows, mask=rows < num_rows, other=0).to(tl.int32)
        tl.store(token_ptr + rows, choice // top_k, mask=rows < num_rows)
        return
    expert = pid % num_experts
    height = LOWEST << table
    base = table * stride
    before, num_own, first_row = tiles_before(offsets_ptr, expert, num_experts, height, BE)
    if expert == num_experts - 1:  # the unused entries follow its own
        tl.store(num_used_ptr + table, before + num_own)
        tl.store(num_used_ptr + num_tables, 0)
        last_row = tl.load(offsets_ptr + expert).to(tl.int32)
        num_unused = tl.cdiv(num_rows, height) + num_experts - before - num_own
        for i in range(0, num_unused, CHUNK):
            at = base + before + num_own + i + chunk
            tl.store(expert_ptr + at, tl.full([CHUNK], -1, tl.int32), mask=i + chunk < num_unused)
            tl.store(start_ptr + at, last_row + (i + chunk) * height, mask=i + chunk < num_unused)
    for i in range(0, num_own, CHUNK):
        at = base + before + i + chunk
        in_range = i + chunk < num_own
        tl.store(expert_ptr + at, tl.full([CHUNK], 0, tl.int32) + expert, mask=in_range)
        tl.store(start_ptr + at, first_row + (i + chunk) * height, mask=in_range)


class Plan:
    """The token of each sorted row, and the row tiles of the experts for every tile height.

    plan[height] is a pair of (tiles,) int32 tensors: the expert of each tile, -1 where unused, and
    its first row.
    permutation: (N,) flat index t * K + k of the routed choice at each sorted row.
    offsets: (E,) end of each expert's rows, an inclusive prefix sum of the counts.
    """

    def __init__(self, permutation_N: Tensor, offsets_E: Tensor, top_k: int) -> None:
        self.permutation, self.offsets, self.num_rows = (
            permutation_N,
            offsets_E,
            permutation_N.numel(),
        )
        num_experts = offsets_E.shape[0]
        # permutation // top_k is computed here once: in the inner loop of a GEMM the division costs
        # more than the load.
        self.token = torch.empty(self.num_rows, dtype=torch.int32, device=offsets_E.device)
        # Each table starts at a multiple of 16 bytes: Triton compiles a second version of a kernel
        # for pointers that are not aligned.
        stride = cdiv(most_tiles(self.num_rows, num_experts, HEIGHTS[0]), 4) * 4
        shape = (2, len(HEIGHTS), stride)
        self.tables = torch.empty(shape, dtype=torch.int32, device=offsets_E.device)
        self._num_used = torch.empty(len(HEIGHTS) + 1, dtype=torch.int32, device=offsets_E.device)
        programs = len(HEIGHTS) * num_experts + cdiv(self.num_rows, _CHUNK)
        launch(
            *(_plan_kernel, (programs,)),
            *(permutation_N, offsets_E, self.token, self.tables[0], self.tables[1], self._num_used),
            *(self.num_rows, num_experts, top_k, len(HEIGHTS), stride),
            LOWEST=HEIGHTS[0],
            CHUNK=_CHUNK,
            BE=next_power_of_2(num_experts),
            num_warps=4,
        )

    def __getitem__(self, height: int) -> tuple[Tensor, Tensor]:
        tiles = most_tiles(self.num_rows, self.offsets.shape[0], height)
        at = HEIGHTS.index(height)
        return self.tables[0, at, :tiles], self.tables[1, at, :tiles]

    def by_expert(self, height: int, weight_EOI: Tensor) -> bool:
        """Return True if no group of row tiles has tiles of two experts (`row_tile`).

        It depends on the average expert, so that the host need not wait for the loads.
        """
        experts, outer, inner = weight_EOI.shape
        few = self.num_rows <= BY_EXPERT_UP_TO * height * experts
        return few and outer * inner * weight_EOI.itemsize >= BY_EXPERT_WEIGHTS

    def num_used(self, height: int) -> Tensor:
        """Return (1,) int32: the number of tiles of this height with an expert; they come first."""
        at = HEIGHTS.index(height)
        return self._num_used[at : at + 1]

    @property
    def counter(self) -> Tensor:
        """Return (1,) int32, zero: it counts tiles for one launch at a time (next_tile.py)."""
        return self._num_used[len(HEIGHTS) :]
