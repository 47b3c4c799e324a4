"""Grouped GEMMs of the expert MLPs over rows sorted by expert, with fused prologue and epilogue.

    up_kernel            h (N, W) = x[token] @ up[e]^T + up_bias[e], gathering tokens
                         a (N, F) = dropout(act(h)), in the epilogue
    grouped_gemm_kernel  y (N, O) = a @ w[e]^T + bias[e], or a @ w[e]: the down projection, and in
                         the backward the gradients by a ("hidden") and by x ("input")

x (T, D) tokens; N = T * K routed rows, K experts per token; e is the expert of a row. up (E, W, D)
with W = F, or 2F for swiglu (gate rows, then up rows); down (E, D, F). Accumulation is float32.

A program computes one (BM, BN) output tile of one expert (tiles.py). PERSISTENT launches as many
programs as fit on the GPU; each iterates over its tiles in one flattened loop over all their K
blocks, so that the loads of the next tile overlap the epilogue of the current one.

Lower bounds with 2-byte elements: up reads N * D and E * W * D elements and writes N * (W + F); its
2 * N * D * W operations dominate from D = 512 on.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dot import dot_with_precision
from acmoe.ops.device.dropout_rng import keep_scale
from acmoe.ops.experts.triton.activation import gelu, relu, silu
from acmoe.ops.experts.triton.tiles import first_column, row_tile


@triton.jit
def _up_tile(
    expert, start_row, end, n_tile, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr, a_ptr, token_ptr,
    seed_ptr, D, F, GATHER: tl.constexpr, SAVE_H: tl.constexpr, ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROP_THRESHOLD: tl.constexpr, EVEN_K: tl.constexpr,
    SHIFT_EDGE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `up_kernel`."""
    rows = start_row + tl.arange(0, BM)
    row_mask = rows < end
    x_rows = tl.where(row_mask, rows, 0)
    if GATHER:
        x_rows = tl.load(token_ptr + rows, mask=row_mask, other=0)
    x_rows = x_rows.to(tl.int64)
    first_col = first_column(n_tile, F, SHIFT_EDGE, BN)
    cols = first_col + tl.arange(0, BN)
    col_mask = cols < F
    safe_cols = cols if SHIFT_EDGE else tl.where(col_mask, cols, 0)
    k = tl.arange(0, BK)
    W = 2 * F if ACT == "swiglu" else F
    # Gate and up weights stacked to 2 * BN rows make one MMA, which reads x from shared memory
    # once.
    FUSED: tl.constexpr = TMA and ACT == "swiglu"
    x_ptrs = x_ptr + x_rows[:, None] * D + k[None, :]
    w_ptrs = w_ptr + (expert.to(tl.int64) * W + safe_cols[None, :]) * D + k[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    acc_up = tl.zeros((BM, BN), dtype=tl.float32)
    acc_both = tl.zeros((BM, 2 * BN), dtype=tl.float32)
    for start in range(0, D, BK):
        k_mask = k < D - start
        if TMA and not GATHER:
            x = x_desc.load([start_row, start])
        elif EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
        if FUSED:
            w = w_desc.load([2 * expert, first_col, start]).reshape(2 * BN, BK)
            acc_both = dot_with_precision(x, w.T, acc_both, PRECISION)
        elif TMA:
            acc = dot_with_precision(
                x, w_desc.load([expert * F + first_col, start]).T, acc, PRECISION
            )
        else:
            acc = dot_with_precision(
                x, tl.load(w_ptrs, mask=k_mask[:, None], other=0.0), acc, PRECISION
            )
            if ACT == "swiglu":
                up_offset = F.to(tl.int64) * D
                w = tl.load(w_ptrs + up_offset, mask=k_mask[:, None], other=0.0)
                acc_up = dot_with_precision(x, w, acc_up, PRECISION)
        x_ptrs += BK
        w_ptrs += BK

    if FUSED:
        acc, acc_up = acc_both.reshape(BM, 2, BN).permute(0, 2, 1).split()
    up_epilogue(
        acc, acc_up, bias_ptr, h_ptr, a_ptr, seed_ptr, expert, rows, row_mask, cols, F, SAVE_H, ACT,
        HAS_BIAS, DROP_THRESHOLD, SHIFT_EDGE,
    )  # fmt: skip


@triton.jit
def up_epilogue(
    acc, acc_up, bias_ptr, h_ptr, a_ptr, seed_ptr, expert, rows, row_mask, cols, F,
    SAVE_H: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, DROP_THRESHOLD: tl.constexpr,
    SHIFT_EDGE: tl.constexpr,
):  # fmt: skip
    """Epilogue of the up GEMM: add biases, store h if SAVE_H, store a = dropout(act(h)).

    acc holds the gate projection and acc_up the up projection of swiglu; the other activations
    ignore acc_up.
    """
    W = 2 * F if ACT == "swiglu" else F
    col_mask = cols < F
    safe_cols = cols if SHIFT_EDGE else tl.where(col_mask, cols, 0)
    out_rows = rows.to(tl.int64)
    mask = row_mask[:, None] if SHIFT_EDGE else row_mask[:, None] & col_mask[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * W + safe_cols)[None, :].to(tl.float32)
    # The activation takes h rounded to the dtype in which it is saved, as the backward will. The
    # rounding also comes first because the layout conversion before the stores then moves 16-bit
    # values, half the traffic, and once instead of twice.
    h = acc.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + out_rows[:, None] * W + cols[None, :]
    if SAVE_H:
        tl.store(h_ptrs, h, mask=mask)
    if ACT == "swiglu":
        if HAS_BIAS:
            acc_up += tl.load(bias_ptr + expert * W + F + safe_cols)[None, :].to(tl.float32)
        u = acc_up.to(h_ptr.dtype.element_ty)
        if SAVE_H:
            tl.store(h_ptrs + F, u, mask=mask)
        value = silu(h.to(tl.float32)) * u.to(tl.float32)
    elif ACT == "gelu":
        value = gelu(h.to(tl.float32))
    else:
        value = relu(h.to(tl.float32))
    if DROP_THRESHOLD > 0:
        value *= keep_scale(seed_ptr, rows, cols, DROP_THRESHOLD)
    tl.store(
        a_ptr + out_rows[:, None] * F + cols[None, :], value.to(a_ptr.dtype.element_ty), mask=mask
    )


# Arguments that depend on the number of rows are not specialised, so that a new batch size does not
# trigger a compilation.
@triton.jit(do_not_specialize=["num_tiles", "num_n"])
def up_kernel(
    x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr, a_ptr, token_ptr, tile_expert_ptr,
    tile_start_ptr, offsets_ptr, num_used_ptr, seed_ptr, D, F, num_tiles, num_n,
    PERSISTENT: tl.constexpr, GROUP_M: tl.constexpr, BY_EXPERT: tl.constexpr, GATHER: tl.constexpr,
    SAVE_H: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, DROP_THRESHOLD: tl.constexpr,
    EVEN_K: tl.constexpr, SHIFT_EDGE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute a (N, F) = dropout(act(h)), and store h (N, W) if SAVE_H.

    h = x[token] @ up[e]^T + bias[e] for tokens x (T, D) if GATHER, else for sorted rows x (N, D).
    Programs: PERSISTENT, any number; otherwise one for each of num_tiles * num_n tiles.
    """
    if PERSISTENT:
        num_used = tl.load(num_used_ptr)
        for tile_id in tl.range(
            tl.program_id(0), num_used * num_n, tl.num_programs(0), flatten=True
        ):
            expert, start_row, end, n_tile = row_tile(
                *(tile_id, tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used, num_n),
                *(GROUP_M, BY_EXPERT, BM),
            )
            _up_tile(
                *(expert, start_row, end, n_tile, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr),
                *(a_ptr, token_ptr, seed_ptr, D, F),
                *(GATHER, SAVE_H, ACT, HAS_BIAS, DROP_THRESHOLD, EVEN_K, SHIFT_EDGE, TMA),
                *(PRECISION, BM, BN, BK),
            )
    else:
        expert, start_row, end, n_tile = row_tile(
            *(tl.program_id(0), tile_expert_ptr, tile_start_ptr, offsets_ptr, num_tiles, num_n),
            *(GROUP_M, BY_EXPERT, BM),
        )
        if expert < 0:
            return
        _up_tile(
            *(expert, start_row, end, n_tile, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, h_ptr),
            *(a_ptr, token_ptr, seed_ptr, D, F),
            *(GATHER, SAVE_H, ACT, HAS_BIAS, DROP_THRESHOLD, EVEN_K, SHIFT_EDGE, TMA),
            *(PRECISION, BM, BN, BK),
        )


@triton.jit
def _grouped_gemm_tile(
    expert, start_row, end, n_tile, a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, I, O,
    GATHER: tl.constexpr, WEIGHT_IO: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    SHIFT_EDGE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `grouped_gemm_kernel`."""
    rows = start_row + tl.arange(0, BM)
    row_mask = rows < end
    # Past the expert's last row, pointer loads read that row again and TMA reads the next expert's
    # rows. Neither result is stored, which is cheaper than a mask in the loop.
    a_rows = tl.minimum(rows, end - 1)
    if GATHER:
        a_rows = tl.load(token_ptr + a_rows)
    a_rows = a_rows.to(tl.int64)
    first_col = first_column(n_tile, O, SHIFT_EDGE, BN)
    cols = first_col + tl.arange(0, BN)
    col_mask = cols < O
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + a_rows[:, None] * I + k[None, :]
    base = w_ptr + expert.to(tl.int64) * I * O
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, I, BK):
        k_mask = k < I - start
        if TMA and not GATHER:
            a = a_desc.load([start_row, start])
        elif EVEN_K:
            a = tl.load(a_ptrs + start)
        else:
            a = tl.load(a_ptrs + start, mask=k_mask[None, :], other=0.0)
        if TMA:
            if WEIGHT_IO:
                w = w_desc.load([expert * I + start, first_col])
                if not EVEN_K:  # the block reaches into the next expert's weight
                    w = tl.where(k_mask[:, None], w, 0.0)
            else:
                w = w_desc.load([expert * O + first_col, start]).T
        else:
            mask = k_mask[:, None] if SHIFT_EDGE else k_mask[:, None] & col_mask[None, :]
            if WEIGHT_IO:
                w_ptrs = base + (start + k)[:, None].to(tl.int64) * O + cols[None, :]
            else:
                w_ptrs = base + cols[None, :].to(tl.int64) * I + (start + k)[:, None]
            w = tl.load(w_ptrs, mask=mask, other=0.0)
        acc = dot_with_precision(a, w, acc, PRECISION)
    if HAS_BIAS:
        safe_cols = cols if SHIFT_EDGE else tl.where(col_mask, cols, 0)
        acc += tl.load(bias_ptr + expert * O + safe_cols)[None, :].to(tl.float32)
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * O + cols[None, :]
    mask = row_mask[:, None] if SHIFT_EDGE else row_mask[:, None] & col_mask[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles", "num_n"])
def grouped_gemm_kernel(
    a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, tile_expert_ptr, tile_start_ptr,
    offsets_ptr, num_used_ptr, I, O, num_tiles, num_n, PERSISTENT: tl.constexpr,
    GROUP_M: tl.constexpr, BY_EXPERT: tl.constexpr, GATHER: tl.constexpr, WEIGHT_IO: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, SHIFT_EDGE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute y (N, O) = a @ w[e]^T + bias[e] for w (E, O, I), or with WEIGHT_IO a @ w[e].

    WEIGHT_IO: w is (E, I, O).
    a (N, I) holds sorted rows, or (T, I) tokens with GATHER.
    Programs: PERSISTENT, any number; otherwise one for each of num_tiles * num_n tiles.
    """
    if PERSISTENT:
        num_used = tl.load(num_used_ptr)
        for tile_id in tl.range(
            tl.program_id(0), num_used * num_n, tl.num_programs(0), flatten=True
        ):
            expert, start_row, end, n_tile = row_tile(
                *(tile_id, tile_expert_ptr, tile_start_ptr, offsets_ptr, num_used, num_n),
                *(GROUP_M, BY_EXPERT, BM),
            )
            _grouped_gemm_tile(
                *(expert, start_row, end, n_tile),
                *(a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, I, O),
                *(GATHER, WEIGHT_IO, HAS_BIAS, EVEN_K, SHIFT_EDGE, TMA, PRECISION, BM, BN, BK),
            )
    else:
        expert, start_row, end, n_tile = row_tile(
            *(tl.program_id(0), tile_expert_ptr, tile_start_ptr, offsets_ptr, num_tiles, num_n),
            *(GROUP_M, BY_EXPERT, BM),
        )
        if expert < 0:
            return
        _grouped_gemm_tile(
            *(expert, start_row, end, n_tile),
            *(a_ptr, a_desc, w_ptr, w_desc, bias_ptr, y_ptr, token_ptr, I, O),
            *(GATHER, WEIGHT_IO, HAS_BIAS, EVEN_K, SHIFT_EDGE, TMA, PRECISION, BM, BN, BK),
        )
