"""Gradients of the expert weights by as many programs as the chip holds, tile after tile.

A tile's rows are a head of fewer than BK and then whole blocks, all of which, of all tiles of a
program, are one loop: while a tile is stored the copy engine already fetches the blocks of the next
one. Its head, which needs masks and so ordinary loads, is fetched before the store and multiplied
after it, when the accumulators are free. Both factors are rows: tokens gathered by pointers in this
loop took 1.2 to 2 times what a program for each tile takes (H200, olmoe, qwen30b, fine).

Shapes as in expert_forward.py.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import dot_as
from acmoe.ops.experts.triton.tiles import first_column, tile_of
from acmoe.ops.experts.triton.weights import part_rows


@triton.jit
def _all_blocks(
    end_ptr, O, I, num_splits, num_parts, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """Blocks of all tiles of this program, one at least a tile."""
    tiles = tl.cdiv(O, BM) * tl.cdiv(I, BN)
    part = tl.arange(0, BP)
    known = part < num_parts
    begin, end = part_rows(end_ptr, tl.where(known, part, 0), num_splits, BK)
    blocks = tl.maximum((end - begin) // BK, 1)
    programs = tl.num_programs(0)
    before = part * tiles - tl.program_id(0) + programs - 1  # of which every `programs`th is ours
    mine = (before + tiles) // programs - before // programs
    return tl.sum(tl.where(known, mine * blocks, 0))


@triton.jit
def _tile_at(
    place, end_ptr, O, I, num_splits, GROUP: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Part, its rows' begin and end, first output and first input of a tile."""
    num_o, num_i = tl.cdiv(O, BM), tl.cdiv(I, BN)
    part = place // (num_o * num_i)
    begin, end = part_rows(end_ptr, part, num_splits, BK)
    tile_o, tile_i = tile_of(place % (num_o * num_i), num_o, num_i, GROUP)
    first_o = first_column(tile_o, O, WHOLE, BM)
    return part, begin, end, first_o, first_column(tile_i, I, WHOLE, BN)


@triton.jit
def _masked(ptr, rows, inside, first, width, WHOLE: tl.constexpr, BN: tl.constexpr):
    """(rows, BN), zero where a row is not inside."""
    cols = first + tl.arange(0, BN)
    mask = inside[:, None] if WHOLE else inside[:, None] & (cols < width)[None, :]
    return tl.load(ptr + rows[:, None] * width + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _head(
    p_ptr, q_ptr, begin, end, first_o, first_i, O, I, WHOLE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The rows before a tile's first whole block, of p and q."""
    step = tl.arange(0, BK)
    inside = step < (end - begin) % BK
    rows = tl.where(inside, begin + step, 0).to(tl.int64)
    p = _masked(p_ptr, rows, inside, first_o, O, WHOLE, BM)
    return p, _masked(q_ptr, rows, inside, first_i, I, WHOLE, BN)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_parts"])
def persistent_weight_kernel(
    p_ptr,
    p_desc,
    q_ptr,
    q_desc,
    dw_ptr,
    end_ptr,
    O,
    I,
    num_splits,
    num_parts,
    num_rows,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BP: tl.constexpr,
):
    """As `weight_kernel`, where both p and q hold rows."""
    tl.static_assert(TMA, "whole blocks come by the copy engine")
    programs = tl.num_programs(0)
    last_place = tl.cdiv(O, BM) * tl.cdiv(I, BN) * num_parts - 1
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    # Before the first tile stands one of a single block that nobody stores: the heads of all tiles
    # then have one place in the code, and one in shared memory.
    place = tl.program_id(0) - programs
    part, first_o, first_i, start, end = 0, 0, 0, -BK, BK
    for _ in range(1 + _all_blocks(end_ptr, O, I, num_splits, num_parts, BM, BN, BK, BP)):
        start += BK
        if start >= end:
            place += programs
            part, begin, end, first_o, first_i = _tile_at(
                place, end_ptr, O, I, num_splits, GROUP, WHOLE, BM, BN, BK
            )  # fmt: skip
            start = begin + (end - begin) % BK
            if start == end:  # no whole block: behind all rows the engine reads zeros
                start = num_rows
        p, q = p_desc.load([start, first_o]), q_desc.load([start, first_i])
        acc = dot_as(tl.trans(p), q, acc, PRECISION)
        if start + BK >= end:
            _, head, next_end, next_o, next_i = _tile_at(
                *(tl.minimum(place + programs, last_place), end_ptr, O, I),
                *(num_splits, GROUP, WHOLE, BM, BN, BK),
            )
            p_head, q_head = _head(
                p_ptr, q_ptr, head, next_end, next_o, next_i, O, I, WHOLE, BM, BN, BK
            )
            if place >= 0:
                o, i = first_o + tl.arange(0, BM), first_i + tl.arange(0, BN)
                w_ptrs = dw_ptr + (part.to(tl.int64) * O + o[:, None]) * I + i[None, :]
                value = acc.to(dw_ptr.dtype.element_ty)
                if WHOLE:
                    tl.store(w_ptrs, value)
                else:
                    tl.store(w_ptrs, value, mask=(o < O)[:, None] & (i < I)[None, :])
            zero = tl.zeros((BM, BN), dtype=tl.float32)
            acc = dot_as(tl.trans(p_head), q_head, zero, PRECISION)
