"""Persistent grouped GEMM for the gradients of the expert weights: dw[e] = p^T q over e's rows.

The same function as `weight_kernel` (weights.py) for p (N, O) and q (N, I) that both hold sorted
rows. As many programs as fit on the GPU each iterate over every num_programs-th (BM, BN) tile of
all K slices.

The rows of a tile are a remainder of fewer than BK rows followed by full blocks of BK. The full
blocks of all tiles of a program form one loop, so that TMA already loads the next tile's blocks
while a tile is stored. The next tile's remainder needs masks and so ordinary loads; these are
issued before the store and multiplied after it, when the accumulator is free. Operands gathered by
pointers in this loop took 1.2 to 2 times as long as one program a tile does (H200, olmoe, qwen30b,
fine), so they stay with `weight_kernel`.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import dot_with_precision
from acmoe.ops.experts.triton.tiles import first_column, tile_coords
from acmoe.ops.experts.triton.weights import k_slice_rows


@triton.jit
def _count_blocks(
    offsets_ptr, O, I, num_splits, num_k_slices, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Return the number of loop iterations of this program: max(full blocks, 1) for each tile."""
    tiles = tl.cdiv(O, BM) * tl.cdiv(I, BN)
    k_slice = tl.arange(0, BP)
    valid = k_slice < num_k_slices
    begin, end = k_slice_rows(offsets_ptr, tl.where(valid, k_slice, 0), num_splits, BK)
    blocks = tl.maximum((end - begin) // BK, 1)
    programs = tl.num_programs(0)
    # Every `programs`-th tile is this program's.
    before = k_slice * tiles - tl.program_id(0) + programs - 1
    num_own = (before + tiles) // programs - before // programs
    return tl.sum(tl.where(valid, num_own * blocks, 0))


@triton.jit
def _tile_at(
    tile_id, offsets_ptr, O, I, num_splits, GROUP_M: tl.constexpr, SHIFT_EDGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return a tile's K slice, its begin and end row, and the first row and column of dw."""
    num_o, num_i = tl.cdiv(O, BM), tl.cdiv(I, BN)
    k_slice = tile_id // (num_o * num_i)
    begin, end = k_slice_rows(offsets_ptr, k_slice, num_splits, BK)
    tile_o, tile_i = tile_coords(tile_id % (num_o * num_i), num_o, num_i, GROUP_M)
    first_o = first_column(tile_o, O, SHIFT_EDGE, BM)
    return k_slice, begin, end, first_o, first_column(tile_i, I, SHIFT_EDGE, BN)


@triton.jit
def _load_masked(ptr, rows, row_mask, first_col, width, SHIFT_EDGE: tl.constexpr, BN: tl.constexpr):
    """Load (rows, BN) from `first_col` on, with zeros where row_mask is false."""
    cols = first_col + tl.arange(0, BN)
    mask = row_mask[:, None] if SHIFT_EDGE else row_mask[:, None] & (cols < width)[None, :]
    return tl.load(ptr + rows[:, None] * width + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _load_remainder(
    p_ptr, q_ptr, begin, end, first_o, first_i, O, I, SHIFT_EDGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load the remainder of p and q, the rows before a tile's first full block, zero-padded."""
    step = tl.arange(0, BK)
    row_mask = step < (end - begin) % BK
    rows = tl.where(row_mask, begin + step, 0).to(tl.int64)
    p = _load_masked(p_ptr, rows, row_mask, first_o, O, SHIFT_EDGE, BM)
    return p, _load_masked(q_ptr, rows, row_mask, first_i, I, SHIFT_EDGE, BN)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_k_slices"])
def persistent_weight_kernel(
    p_ptr,
    p_desc,
    q_ptr,
    q_desc,
    dw_ptr,
    offsets_ptr,
    O,
    I,
    num_splits,
    num_k_slices,
    num_rows,
    GROUP_M: tl.constexpr,
    SHIFT_EDGE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BP: tl.constexpr,
):
    """Compute dw as `weight_kernel` does, with any number of programs; p and q both hold rows."""
    tl.static_assert(TMA, "full blocks are loaded by TMA")
    programs = tl.num_programs(0)
    last_tile_id = tl.cdiv(O, BM) * tl.cdiv(I, BN) * num_k_slices - 1
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    # The loop starts with a dummy tile of one block that is not stored. The remainders of all tiles
    # are then loaded at one point of the code, into one shared-memory buffer.
    tile_id = tl.program_id(0) - programs
    k_slice, first_o, first_i, start, end = 0, 0, 0, -BK, BK
    for _ in range(1 + _count_blocks(offsets_ptr, O, I, num_splits, num_k_slices, BM, BN, BK, BP)):
        start += BK
        if start >= end:
            tile_id += programs
            k_slice, begin, end, first_o, first_i = _tile_at(
                tile_id, offsets_ptr, O, I, num_splits, GROUP_M, SHIFT_EDGE, BM, BN, BK
            )  # fmt: skip
            start = begin + (end - begin) % BK
            if start == end:  # no full block: TMA reads zeros past the last row
                start = num_rows
        p, q = p_desc.load([start, first_o]), q_desc.load([start, first_i])
        acc = dot_with_precision(tl.trans(p), q, acc, PRECISION)
        if start + BK >= end:
            _, next_begin, next_end, next_o, next_i = _tile_at(
                *(tl.minimum(tile_id + programs, last_tile_id), offsets_ptr, O, I),
                *(num_splits, GROUP_M, SHIFT_EDGE, BM, BN, BK),
            )
            p_remainder, q_remainder = _load_remainder(
                p_ptr, q_ptr, next_begin, next_end, next_o, next_i, O, I, SHIFT_EDGE, BM, BN, BK
            )
            if tile_id >= 0:
                o, i = first_o + tl.arange(0, BM), first_i + tl.arange(0, BN)
                w_ptrs = dw_ptr + (k_slice.to(tl.int64) * O + o[:, None]) * I + i[None, :]
                value = acc.to(dw_ptr.dtype.element_ty)
                if SHIFT_EDGE:
                    tl.store(w_ptrs, value)
                else:
                    tl.store(w_ptrs, value, mask=(o < O)[:, None] & (i < I)[None, :])
            zero = tl.zeros((BM, BN), dtype=tl.float32)
            acc = dot_with_precision(tl.trans(p_remainder), q_remainder, zero, PRECISION)
