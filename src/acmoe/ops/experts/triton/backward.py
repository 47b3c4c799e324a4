"""Backward of the expert MLPs outside their GEMMs: activation, gate and bias gradients.

    activation_kernel        recomputes a = act(h) instead of reading it; from da = grad @ down it
                             computes dh = gate * da * act'(h) and gate * a, and writes for each
                             tile partial sums of the gate and bias gradients
    reduce_partials_kernel   adds these partial sums up, in a fixed order (no atomics)

Shapes as in forward.py: h, dh (N, W), da, a (N, F), gate (T, K), grad (T, D) the gradient by the
layer's output; B blocks of BN columns of the F hidden units. activation_kernel has a program for
each row tile of an expert and each column block, and is bound by memory: it reads and writes N * (F
+ W) elements.

The gradient GEMMs are `grouped_gemm_kernel` (forward.py) for activations, and weights.py and
persistent_weights.py for weights. The activation's backward could be fused into the epilogue of the
GEMM before it. The best of 22 such variants took 2.38 ms, against 1.64 + 0.86 ms for two kernels
(H200, olmoe; no difference at mixtral): too little gain for a second version of both kernels.
Fusing them pays with warp specialisation, where one consumer runs the epilogue while the other
multiplies (hopper/hidden.py).
"""

import triton
import triton.language as tl

from acmoe.ops.device.dropout_rng import keep_scale
from acmoe.ops.experts.triton.activation import activate
from acmoe.ops.experts.triton.tiles import tiles_before


@triton.jit(do_not_specialize=["num_rows"])
def activation_kernel(
    da_ptr,
    h_ptr,
    dh_ptr,
    gate_ptr,
    grad_ptr,
    dgate_partial_ptr,
    dbias_partial_ptr,
    permutation_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    seed_ptr,
    num_rows,
    D,
    F,
    num_blocks,
    top_k,
    ACT: tl.constexpr,
    UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    DROP_THRESHOLD: tl.constexpr,
    HEIGHT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute dh (N, W) and gate * a (N, F) from da (N, F) = grad @ down, with partial sums.

    gate * a is written over da, and dh may alias h, so that the largest buffers are allocated once.
    dgate_partial (B, N): da * a summed over a block of columns.
    dbias_partial (tiles, W + D, less where a bias is missing): sums over the tile's rows of dh for
    the up bias and of gate * grad for the down bias.
    Programs: (row tile, column block); the column blocks of D for the down bias follow the
    num_blocks blocks of hidden units. A program steps over its HEIGHT rows BM at a time, so that a
    thread adds up its columns in registers.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:  # an unused tile: these rows were routed to no expert
        return
    first_row = tl.load(tile_start_ptr + tile)
    end_row = tl.minimum(first_row + HEIGHT, tl.load(offsets_ptr + expert)).to(tl.int32)
    W = 2 * F if ACT == "swiglu" else F
    num_bias_cols = (W if UP_BIAS else 0) + (D if DOWN_BIAS else 0)
    dbias_partial_ptr += tile.to(tl.int64) * num_bias_cols
    if block < num_blocks:
        _activation_backward(
            da_ptr, h_ptr, dh_ptr, gate_ptr, dgate_partial_ptr + block.to(tl.int64) * num_rows,
            dbias_partial_ptr, permutation_ptr, seed_ptr, first_row, end_row, block * BN, F, W, ACT,
            UP_BIAS, DROP_THRESHOLD, BM, BN,
        )  # fmt: skip
    else:
        _down_bias_partial(
            grad_ptr, gate_ptr, dbias_partial_ptr + num_bias_cols - D, permutation_ptr, first_row,
            end_row, (block - num_blocks) * BN, D, top_k, BM, BN,
        )  # fmt: skip


@triton.jit
def _activation_backward(
    da_ptr, h_ptr, dh_ptr, gate_ptr, dgate_partial_ptr, dbias_partial_ptr, permutation_ptr,
    seed_ptr, first_row, end_row, first_col, F, W, ACT: tl.constexpr, UP_BIAS: tl.constexpr,
    DROP_THRESHOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write dh, gate * a and the partial sums of one row tile and BN hidden units."""
    cols = first_col + tl.arange(0, BN)
    dh_sum = tl.zeros((BM, BN), dtype=tl.float32)
    du_sum = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(first_row, end_row, BM):
        rows = start + tl.arange(0, BM)
        row_mask = rows < end_row
        gate = _load_gate(rows, row_mask, gate_ptr, permutation_ptr)
        mask = row_mask[:, None] & (cols < F)[None, :]
        da_ptrs = da_ptr + rows[:, None].to(tl.int64) * F + cols[None, :]
        h_offsets = rows[:, None].to(tl.int64) * W + cols[None, :]
        h_ptrs, dh_ptrs = h_ptr + h_offsets, dh_ptr + h_offsets
        da = tl.load(da_ptrs, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
        u = h
        if ACT == "swiglu":
            u = tl.load(h_ptrs + F, mask=mask, other=0.0).to(tl.float32)
        a, slope, slope_u = activate(h, u, ACT)
        if DROP_THRESHOLD > 0:
            factor = keep_scale(seed_ptr, rows, cols, DROP_THRESHOLD)
            a *= factor
            slope *= factor
            slope_u *= factor
        tl.store(dgate_partial_ptr + rows, tl.sum(da * a, axis=1), mask=row_mask)
        d = da * gate[:, None]
        dh = d * slope
        tl.store(dh_ptrs, dh.to(h_ptr.dtype.element_ty), mask=mask)
        tl.store(da_ptrs, (a * gate[:, None]).to(da_ptr.dtype.element_ty), mask=mask)
        dh_sum += dh
        if ACT == "swiglu":
            du = d * slope_u
            tl.store(dh_ptrs + F, du.to(h_ptr.dtype.element_ty), mask=mask)
            du_sum += du
    if UP_BIAS:
        tl.store(dbias_partial_ptr + cols, tl.sum(dh_sum, axis=0), mask=cols < F)
        if ACT == "swiglu":
            tl.store(dbias_partial_ptr + F + cols, tl.sum(du_sum, axis=0), mask=cols < F)


@triton.jit
def _down_bias_partial(
    grad_ptr, gate_ptr, dbias_partial_ptr, permutation_ptr, first_row, end_row, first_col, D, top_k,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the sum of gate * grad over the tokens of a row tile: the down bias's partial sum."""
    cols = first_col + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(first_row, end_row, BM):
        rows = start + tl.arange(0, BM)
        row_mask = rows < end_row
        gate = _load_gate(rows, row_mask, gate_ptr, permutation_ptr)
        token = tl.load(permutation_ptr + rows, mask=row_mask, other=0) // top_k
        mask = row_mask[:, None] & (cols < D)[None, :]
        grad = tl.load(grad_ptr + token[:, None] * D + cols[None, :], mask=mask, other=0.0)
        acc += grad.to(tl.float32) * gate[:, None]
    tl.store(dbias_partial_ptr + cols, tl.sum(acc, axis=0), mask=cols < D)


@triton.jit
def _load_gate(rows, row_mask, gate_ptr, permutation_ptr):
    """Return gate[permutation[rows]] as float32, 0 outside the mask."""
    choice = tl.load(permutation_ptr + rows, mask=row_mask, other=0)
    return tl.load(gate_ptr + choice, mask=row_mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def reduce_partials_kernel(
    dgate_partial_ptr,
    dbias_partial_ptr,
    bias_dot_ptr,
    dgate_ptr,
    d_up_bias_ptr,
    d_down_bias_ptr,
    permutation_ptr,
    expert_ptr,
    offsets_ptr,
    num_rows,
    num_blocks,
    num_experts,
    top_k,
    num_up_cols,
    num_down_cols,
    num_col_blocks,
    HEIGHT: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add up the partial sums to the bias gradients (E, W) and (E, D) and the gate's (T, K).

    dgate[t, k] is the sum over column blocks of dgate_partial at its row, plus
    bias_dot[t, e] = <grad[t], down_bias[e]> because y includes that bias. It is 0 for a choice that
    was routed to no expert.
    Programs: the first num_experts * num_col_blocks add up BN bias columns of one expert each, the
    rest BM * BN rows of the gate's gradient each.
    """
    pid = tl.program_id(0)
    if pid < num_experts * num_col_blocks:
        _reduce_bias_partials(
            dbias_partial_ptr, d_up_bias_ptr, d_down_bias_ptr, offsets_ptr, pid // num_col_blocks,
            pid % num_col_blocks * BN, num_experts, num_up_cols, num_down_cols, HEIGHT, BE, BM, BN,
        )  # fmt: skip
        return
    rows = (pid - num_experts * num_col_blocks) * BM * BN + tl.arange(0, BM * BN)
    row_mask = rows < num_rows
    routed_mask = rows < tl.load(offsets_ptr + num_experts - 1)
    acc = tl.zeros((BM * BN,), dtype=tl.float32)
    dgate_partial_ptrs = dgate_partial_ptr + rows
    for _ in range(num_blocks):
        acc += tl.load(dgate_partial_ptrs, mask=routed_mask, other=0.0)
        dgate_partial_ptrs += num_rows
    choice = tl.load(permutation_ptr + rows, mask=row_mask, other=0)
    if num_down_cols > 0:
        expert = tl.load(expert_ptr + rows, mask=routed_mask, other=0)
        at = choice // top_k * num_experts + expert
        acc += tl.load(bias_dot_ptr + at, mask=routed_mask, other=0.0).to(tl.float32)
    tl.store(dgate_ptr + choice, acc, mask=row_mask)


@triton.jit
def _reduce_bias_partials(
    dbias_partial_ptr, d_up_bias_ptr, d_down_bias_ptr, offsets_ptr, expert, first_col, num_experts,
    num_up_cols, num_down_cols, HEIGHT: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Sum an expert's row tiles of dbias_partial (tiles, num_up_cols + num_down_cols)."""
    cols = first_col + tl.arange(0, BN)
    num_bias_cols = num_up_cols + num_down_cols
    first_tile, num_own, _ = tiles_before(offsets_ptr, expert, num_experts, HEIGHT, BE)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, num_own, BM):
        tile = start + tl.arange(0, BM)
        mask = (tile < num_own)[:, None] & (cols < num_bias_cols)[None, :]
        at = (first_tile + tile)[:, None].to(tl.int64) * num_bias_cols + cols[None, :]
        acc += tl.load(dbias_partial_ptr + at, mask=mask, other=0.0)
    value = tl.sum(acc, axis=0).to(d_up_bias_ptr.dtype.element_ty)
    tl.store(d_up_bias_ptr + expert * num_up_cols + cols, value, mask=cols < num_up_cols)
    down_ptrs = d_down_bias_ptr + expert * num_down_cols + cols - num_up_cols
    tl.store(down_ptrs, value, mask=(cols >= num_up_cols) & (cols < num_bias_cols))
