"""Grouped GEMM for the gradients of the expert weights: dw[e] = p[rows of e]^T @ q[rows of e].

p (N, O) and q (N, I) are rows sorted by expert, or one of them is tokens to gather; dw (E, O, I).
The reduction dimension is an expert's rows. A program computes a (BM, BN) tile of one expert's dw,
over all its rows or, with split-K, over one K slice of them.

L2 traffic bounds it: a (BM, BN) tile reads BM + BN elements a row for BM * BN multiply-adds, so
tiles are large. Small weights then have too few tiles to fill the GPU; their rows are split in K
slices, and `reduce_splits_kernel` adds up the float32 partial results. Bias gradients are computed
elsewhere (backward.py): summing them in this loop took registers and pipeline stages (H200, swin:
211 TFLOP/s).
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import dot_with_precision
from acmoe.ops.experts.triton.tiles import first_column, tile_coords


@triton.jit
def k_slice_rows(offsets_ptr, k_slice, num_splits, BK: tl.constexpr):
    """Return the begin and end row of a K slice, k_slice = expert * num_splits + split.

    All slices of an expert but its last are a multiple of BK rows long.
    """
    expert = k_slice // num_splits
    end = tl.load(offsets_ptr + expert).to(tl.int32)
    begin = tl.where(expert > 0, tl.load(offsets_ptr + tl.maximum(expert - 1, 0)), 0).to(tl.int32)
    length = tl.cdiv(tl.cdiv(end - begin, num_splits), BK) * BK
    begin = tl.minimum(begin + (k_slice % num_splits) * length, end)
    end = tl.minimum(begin + length, end)
    return begin, end


@triton.jit
def _load_block(
    ptr, desc, rows, start, cols, first, width, BY_TMA: tl.constexpr, SHIFT_EDGE: tl.constexpr
):
    """Load BK full rows: those from `start` on if BY_TMA, else `rows` by pointers."""
    if BY_TMA:
        block = desc.load([start, first])
    elif SHIFT_EDGE:
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
    offsets_ptr,
    O,
    I,
    num_splits,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    SHIFT_EDGE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute dw[e] (O, I) = sum over the rows of expert e of p^T q.

    GATHER is "p" or "q" where that operand is tokens (T, ...), else "none". With num_splits > 1 dw
    is (E, num_splits, O, I), the partial results of the K slices.
    Programs: (output tile in grouped order, K slice).
    """
    num_i = tl.cdiv(I, BN)
    tile_o, tile_i = tile_coords(tl.program_id(0), tl.cdiv(O, BM), num_i, GROUP_M)
    first_o = first_column(tile_o, O, SHIFT_EDGE, BM)
    first_i = first_column(tile_i, I, SHIFT_EDGE, BN)
    k_slice = tl.program_id(1)
    begin, end = k_slice_rows(offsets_ptr, k_slice, num_splits, BK)
    o = first_o + tl.arange(0, BM)
    i = first_i + tl.arange(0, BN)
    step = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    full_end = begin + (end - begin) // BK * BK
    # Token indices are loaded one block ahead, so that a gather does not wait for its indices.
    token = (begin + step).to(tl.int64)
    if GATHER != "none":
        token = tl.load(token_ptr + begin + step, mask=begin + step < end, other=0).to(tl.int64)
    for start in range(begin, full_end, BK):
        rows = start + step
        rows64 = rows.to(tl.int64)
        next_token = rows64 + BK
        if GATHER != "none":
            next_rows = rows + BK
            next_token = tl.load(token_ptr + next_rows, mask=next_rows < end, other=0).to(tl.int64)
        p_rows = token if GATHER == "p" else rows64
        q_rows = token if GATHER == "q" else rows64
        p = _load_block(
            p_ptr, p_desc, p_rows, start, o, first_o, O, TMA and GATHER != "p", SHIFT_EDGE
        )  # fmt: skip
        q = _load_block(
            q_ptr, q_desc, q_rows, start, i, first_i, I, TMA and GATHER != "q", SHIFT_EDGE
        )  # fmt: skip
        acc = dot_with_precision(tl.trans(p), q, acc, PRECISION)
        token = next_token
    if full_end < end:  # the remainder, fewer than BK rows
        rows = full_end + step
        row_mask = rows < end
        rows64 = tl.minimum(rows, end - 1).to(tl.int64)
        p_rows = token if GATHER == "p" else rows64
        q_rows = token if GATHER == "q" else rows64
        p_mask = row_mask[:, None] & (o < O)[None, :]
        q_mask = row_mask[:, None] & (i < I)[None, :]
        p = tl.load(p_ptr + p_rows[:, None] * O + o[None, :], mask=p_mask, other=0.0)
        q = tl.load(q_ptr + q_rows[:, None] * I + i[None, :], mask=q_mask, other=0.0)
        acc = dot_with_precision(tl.trans(p), q, acc, PRECISION)
    w_ptrs = dw_ptr + (k_slice.to(tl.int64) * O + o[:, None]) * I + i[None, :]
    if SHIFT_EDGE:
        tl.store(w_ptrs, acc.to(dw_ptr.dtype.element_ty))
    else:
        tl.store(w_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def reduce_splits_kernel(partial_ptr, out_ptr, size, num_splits, BN: tl.constexpr):
    """Compute out (E, size), the sum over splits of partial (E, num_splits, size)."""
    expert = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), dtype=tl.float32)
    for split in range(num_splits):
        at = (expert * num_splits + split) * size + cols
        acc += tl.load(partial_ptr + at, mask=cols < size, other=0.0)
    tl.store(out_ptr + expert * size + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < size)
