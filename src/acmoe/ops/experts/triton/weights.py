"""Gradients of the expert weights: sums of outer products over each expert's rows.

What bounds them is the traffic from L2: a tile of (BM, BN) outputs reads BM + BN numbers a row for
BM * BN products, so tiles are large. Small weights then have too few tiles for the chip: an
expert's rows are split, and the parts summed after. Bias gradients are none of its business: their
sums, in this loop, took the registers and the stages of the pipeline (H200, swin: 211 TFLOP/s).

Shapes as in expert_forward.py.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import dot_as
from acmoe.ops.experts.triton.tiles import first_column, tile_of


@triton.jit
def part_rows(end_ptr, part, num_splits, BK: tl.constexpr):
    """Where the rows of an expert's part begin and end: all but the last have whole blocks."""
    expert = part // num_splits
    end = tl.load(end_ptr + expert).to(tl.int32)
    begin = tl.where(expert > 0, tl.load(end_ptr + tl.maximum(expert - 1, 0)), 0).to(tl.int32)
    length = tl.cdiv(tl.cdiv(end - begin, num_splits), BK) * BK
    begin = tl.minimum(begin + (part % num_splits) * length, end)
    end = tl.minimum(begin + length, end)
    return begin, end


@triton.jit
def _load_block(
    ptr, desc, rows, start, cols, first, width, COPIED: tl.constexpr, WHOLE: tl.constexpr
):
    """A full block: `rows` by pointers, or, COPIED by the engine, the rows from `start` on."""
    if COPIED:
        block = desc.load([start, first])
    elif WHOLE:
        block = tl.load(ptr + rows[:, None] * width + cols[None, :])
    else:
        mask = (cols < width)[None, :]
        block = tl.load(ptr + rows[:, None] * width + cols[None, :], mask=mask, other=0.0)
    return block


@triton.jit(do_not_specialize=["num_splits"])
def weight_kernel(
    p_ptr,
    p_desc,
    q_ptr,
    q_desc,
    dw_ptr,
    token_ptr,
    end_ptr,
    O,
    I,
    num_splits,
    GROUP: tl.constexpr,
    GATHER: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[e] (O, I) = sum over e's rows of p^T q. GATHER says which of p, q holds tokens, if any.

    With num_splits > 1, dw holds (E, num_splits, O, I) parts.
    """
    num_i = tl.cdiv(I, BN)
    tile_o, tile_i = tile_of(tl.program_id(0), tl.cdiv(O, BM), num_i, GROUP)
    first_o = first_column(tile_o, O, WHOLE, BM)
    first_i = first_column(tile_i, I, WHOLE, BN)
    part = tl.program_id(1)
    begin, end = part_rows(end_ptr, part, num_splits, BK)
    o = first_o + tl.arange(0, BM)
    i = first_i + tl.arange(0, BN)
    step = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    full = begin + (end - begin) // BK * BK
    # The tokens of the next block are fetched a block ahead, so that a gather never waits for them.
    token = (begin + step).to(tl.int64)
    if GATHER != "none":
        token = tl.load(token_ptr + begin + step, mask=begin + step < end, other=0).to(tl.int64)
    for start in range(begin, full, BK):
        rows = start + step
        rows64 = rows.to(tl.int64)
        following = rows64 + BK
        if GATHER != "none":
            ahead = rows + BK
            following = tl.load(token_ptr + ahead, mask=ahead < end, other=0).to(tl.int64)
        p_rows = token if GATHER == "p" else rows64
        q_rows = token if GATHER == "q" else rows64
        p = _load_block(
            p_ptr, p_desc, p_rows, start, o, first_o, O, TMA and GATHER != "p", WHOLE
        )  # fmt: skip
        q = _load_block(
            q_ptr, q_desc, q_rows, start, i, first_i, I, TMA and GATHER != "q", WHOLE
        )  # fmt: skip
        acc = dot_as(tl.trans(p), q, acc, PRECISION)
        token = following
    if full < end:  # the last rows, fewer than a block
        rows = full + step
        inside = rows < end
        rows64 = tl.minimum(rows, end - 1).to(tl.int64)
        p_rows = token if GATHER == "p" else rows64
        q_rows = token if GATHER == "q" else rows64
        p_mask = inside[:, None] & (o < O)[None, :]
        q_mask = inside[:, None] & (i < I)[None, :]
        p = tl.load(p_ptr + p_rows[:, None] * O + o[None, :], mask=p_mask, other=0.0)
        q = tl.load(q_ptr + q_rows[:, None] * I + i[None, :], mask=q_mask, other=0.0)
        acc = dot_as(tl.trans(p), q, acc, PRECISION)
    w_ptrs = dw_ptr + (part.to(tl.int64) * O + o[:, None]) * I + i[None, :]
    if WHOLE:
        tl.store(w_ptrs, acc.to(dw_ptr.dtype.element_ty))
    else:
        tl.store(w_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def add_kernel(part_ptr, out_ptr, size, num_splits, BN: tl.constexpr):
    """out (E, size): the sum of each expert's parts (E, num_splits, size)."""
    expert = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), dtype=tl.float32)
    for split in range(num_splits):
        at = (expert * num_splits + split) * size + cols
        total += tl.load(part_ptr + at, mask=cols < size, other=0.0)
    tl.store(out_ptr + expert * size + cols, total.to(out_ptr.dtype.element_ty), mask=cols < size)
