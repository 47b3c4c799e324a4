"""Expert MLPs over rows sorted by expert: the products, with what stands around them fused in.

    up        gathers tokens, multiplies, adds the bias; activation and dropout in its epilogue
    rows      multiplies rows, adds the bias: down, and the two products of the backward by rows

A program computes one tile; or, PERSISTENT, as many programs as the chip holds take tile after tile
in one loop over the blocks of them all: while one is stored, the next one's are on their way.

x (T, D) tokens; N = T * K routed rows; up (E, W, D) with W = F, or 2F for swiglu (gate, then up);
down (E, D, F). Accumulation is float32. Floors at bf16: up reads N * D and E * W * D, writes
N * (W + F); its 2 * N * D * W operations dominate from D = 512 on.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import dot_as
from acmoe.ops.device.dropout_rng import keep_tile
from acmoe.ops.experts.triton.activation import gelu, positive, silu
from acmoe.ops.experts.triton.tiles import first_column, tile_of


@triton.jit
def _up_tile(
    tile, n_tile, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr, a_ptr, token_ptr, tile_expert_ptr,
    tile_start_ptr, end_ptr, seed_ptr, D, F, GATHER: tl.constexpr, KEEP: tl.constexpr,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, DROPPED: tl.constexpr, EVEN_K: tl.constexpr,
    WHOLE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of `up_kernel`."""
    expert = tl.load(tile_expert_ptr + tile)
    start_row = tl.load(tile_start_ptr + tile)
    rows = start_row + tl.arange(0, BM)
    inside = rows < tl.load(end_ptr + expert)
    source = tl.where(inside, rows, 0)
    if GATHER:
        source = tl.load(token_ptr + rows, mask=inside, other=0)
    source = source.to(tl.int64)
    first = first_column(n_tile, F, WHOLE, BN)
    cols = first + tl.arange(0, BN)
    known = cols < F
    safe = cols if WHOLE else tl.where(known, cols, 0)
    k = tl.arange(0, BK)
    W = 2 * F if ACT == "swiglu" else F
    # Gate and up side by side are one product, which reads x from shared memory once.
    JOINED: tl.constexpr = TMA and ACT == "swiglu"
    x_ptrs = x_ptr + source[:, None] * D + k[None, :]
    w_ptrs = w_ptr + (expert.to(tl.int64) * W + safe[None, :]) * D + k[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    second = tl.zeros((BM, BN), dtype=tl.float32)
    joined = tl.zeros((BM, 2 * BN), dtype=tl.float32)
    for start in range(0, D, BK):
        left = k < D - start
        if TMA and not GATHER:
            x = x_desc.load([start_row, start])
        elif EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=left[None, :], other=0.0)
        if JOINED:
            w = w_desc.load([2 * expert, first, start]).reshape(2 * BN, BK)
            joined = dot_as(x, w.T, joined, PRECISION)
        elif TMA:
            acc = dot_as(x, w_desc.load([expert * F + first, start]).T, acc, PRECISION)
        else:
            acc = dot_as(x, tl.load(w_ptrs, mask=left[:, None], other=0.0), acc, PRECISION)
            if ACT == "swiglu":
                shift = F.to(tl.int64) * D
                w = tl.load(w_ptrs + shift, mask=left[:, None], other=0.0)
                second = dot_as(x, w, second, PRECISION)
        x_ptrs += BK
        w_ptrs += BK

    if JOINED:
        acc, second = joined.reshape(BM, 2, BN).permute(0, 2, 1).split()
    _store_up(
        acc, second, bias_ptr, h_ptr, a_ptr, seed_ptr, expert, rows, inside, cols, F, KEEP, ACT,
        HAS_BIAS, DROPPED, WHOLE,
    )  # fmt: skip


@triton.jit
def _store_up(
    acc, second, bias_ptr, h_ptr, a_ptr, seed_ptr, expert, rows, inside, cols, F,
    KEEP: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, DROPPED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The epilogue: biases, h, activation and dropout. Gated experts have a `second` product."""
    W = 2 * F if ACT == "swiglu" else F
    known = cols < F
    safe = cols if WHOLE else tl.where(known, cols, 0)
    out = rows.to(tl.int64)
    both = inside[:, None] if WHOLE else inside[:, None] & known[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * W + safe)[None, :].to(tl.float32)
    # Of h as it is kept, for backward will see that; and 16 bits change layout before the stores
    # in half the traffic, once instead of twice.
    h = acc.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + out[:, None] * W + cols[None, :]
    if KEEP:
        tl.store(h_ptrs, h, mask=both)
    if ACT == "swiglu":
        if HAS_BIAS:
            second += tl.load(bias_ptr + expert * W + F + safe)[None, :].to(tl.float32)
        u = second.to(h_ptr.dtype.element_ty)
        if KEEP:
            tl.store(h_ptrs + F, u, mask=both)
        value = silu(h.to(tl.float32)) * u.to(tl.float32)
    elif ACT == "gelu":
        value = gelu(h.to(tl.float32))
    else:
        value = positive(h.to(tl.float32))
    if DROPPED > 0:
        value *= keep_tile(seed_ptr, rows, cols, DROPPED)
    tl.store(a_ptr + out[:, None] * F + cols[None, :], value.to(a_ptr.dtype.element_ty), mask=both)


# What hangs on the number of rows is not specialised: batches of other sizes compile nothing new.
@triton.jit(do_not_specialize=["num_tiles", "num_n"])
def up_kernel(
    x_ptr,
    x_desc,
    w_ptr,
    w_desc,
    bias_ptr,
    h_ptr,
    a_ptr,
    token_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    end_ptr,
    live_ptr,
    seed_ptr,
    D,
    F,
    num_tiles,
    num_n,
    PERSISTENT: tl.constexpr,
    GROUP: tl.constexpr,
    GATHER: tl.constexpr,
    KEEP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h (N, W), if to KEEP, and a (N, F) of x (T, D) with GATHER, of rows (N, D) without."""
    if PERSISTENT:
        live = tl.load(live_ptr)
        for place in tl.range(tl.program_id(0), live * num_n, tl.num_programs(0), flatten=True):
            tile, n_tile = tile_of(place, live, num_n, GROUP)
            _up_tile(
                *(tile, n_tile, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr, a_ptr, token_ptr),
                *(tile_expert_ptr, tile_start_ptr, end_ptr, seed_ptr, D, F),
                *(GATHER, KEEP, ACT, HAS_BIAS, DROPPED, EVEN_K, WHOLE, TMA, PRECISION, BM, BN, BK),
            )
    else:
        tile, n_tile = tile_of(tl.program_id(0), num_tiles, num_n, GROUP)
        if tl.load(tile_expert_ptr + tile) < 0:
            return
        _up_tile(
            *(tile, n_tile, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr, a_ptr, token_ptr),
            *(tile_expert_ptr, tile_start_ptr, end_ptr, seed_ptr, D, F),
            *(GATHER, KEEP, ACT, HAS_BIAS, DROPPED, EVEN_K, WHOLE, TMA, PRECISION, BM, BN, BK),
        )


@triton.jit
def _rows_tile(
    tile, n_tile, a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, tile_expert_ptr,
    tile_start_ptr, end_ptr, I, O, GATHER: tl.constexpr, ACROSS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of `rows_kernel`."""
    expert = tl.load(tile_expert_ptr + tile)
    start_row = tl.load(tile_start_ptr + tile)
    end = tl.load(end_ptr + expert)
    rows = start_row + tl.arange(0, BM)
    inside = rows < end
    # Behind its last row pointers read that one again and the copy engine the next expert's; both
    # are thrown away, which is cheaper than a mask in the loop.
    source = tl.minimum(rows, end - 1)
    if GATHER:
        source = tl.load(token_ptr + source)
    source = source.to(tl.int64)
    first = first_column(n_tile, O, WHOLE, BN)
    cols = first + tl.arange(0, BN)
    known = cols < O
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + source[:, None] * I + k[None, :]
    base = w_ptr + expert.to(tl.int64) * I * O
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, I, BK):
        left = k < I - start
        if TMA and not GATHER:
            a = a_desc.load([start_row, start])
        elif EVEN_K:
            a = tl.load(a_ptrs + start)
        else:
            a = tl.load(a_ptrs + start, mask=left[None, :], other=0.0)
        if TMA:
            if ACROSS:
                w = w_desc.load([expert * I + start, first])
                if not EVEN_K:  # the tile reaches into the next expert
                    w = tl.where(left[:, None], w, 0.0)
            else:
                w = w_desc.load([expert * O + first, start]).T
        else:
            both = left[:, None] if WHOLE else left[:, None] & known[None, :]
            if ACROSS:
                w_ptrs = base + (start + k)[:, None].to(tl.int64) * O + cols[None, :]
            else:
                w_ptrs = base + cols[None, :].to(tl.int64) * I + (start + k)[:, None]
            w = tl.load(w_ptrs, mask=both, other=0.0)
        acc = dot_as(a, w, acc, PRECISION)
    if HAS_BIAS:
        safe = cols if WHOLE else tl.where(known, cols, 0)
        acc += tl.load(bias_ptr + expert * O + safe)[None, :].to(tl.float32)
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * O + cols[None, :]
    both = inside[:, None] if WHOLE else inside[:, None] & known[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["num_tiles", "num_n"])
def rows_kernel(
    a_ptr,
    a_desc,
    w_ptr,
    w_desc,
    bias_ptr,
    y_ptr,
    token_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    end_ptr,
    live_ptr,
    I,
    O,
    num_tiles,
    num_n,
    PERSISTENT: tl.constexpr,
    GROUP: tl.constexpr,
    GATHER: tl.constexpr,
    ACROSS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y (N, O) = a times each row's expert's weight, (O, I), or (I, O) if ACROSS.

    a (N, I) holds rows, or with GATHER (T, I) tokens.
    """
    if PERSISTENT:
        live = tl.load(live_ptr)
        for place in tl.range(tl.program_id(0), live * num_n, tl.num_programs(0), flatten=True):
            tile, n_tile = tile_of(place, live, num_n, GROUP)
            _rows_tile(
                *(tile, n_tile),
                *(a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, tile_expert_ptr),
                *(tile_start_ptr, end_ptr, I, O),
                *(GATHER, ACROSS, HAS_BIAS, EVEN_K, WHOLE, TMA, PRECISION, BM, BN, BK),
            )
    else:
        tile, n_tile = tile_of(tl.program_id(0), num_tiles, num_n, GROUP)
        if tl.load(tile_expert_ptr + tile) < 0:
            return
        _rows_tile(
            *(tile, n_tile),
            *(a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, tile_expert_ptr),
            *(tile_start_ptr, end_ptr, I, O),
            *(GATHER, ACROSS, HAS_BIAS, EVEN_K, WHOLE, TMA, PRECISION, BM, BN, BK),
        )
