"""Backward of the expert MLPs beside their products. The activation is computed again, not stored.

    activation   recomputes the activation and its slope, tile by tile; leaves the tile's share of
                 the gate's gradient and of the biases'. In the epilogue of the product before it,
                 in slices of columns, the best of 22 forms took 2.38 ms for 1.64 + 0.86 (H200,
                 olmoe; mixtral as much as apart): too little for a second form of both. Where
                 some warps do the epilogue while others multiply it pays: ring_hidden.py.
    finish       adds up these shares

The products themselves: rows (expert_forward.py) for activations, weight (expert_weights.py,
persistent_weights.py).
Shapes as in expert_forward.py; B blocks of BN columns of the hidden units.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dropout_rng import keep_tile
from acmoe.ops.experts.triton.activation import activate
from acmoe.ops.experts.triton.tiles import tiles_before


@triton.jit(do_not_specialize=["num_rows"])
def activation_kernel(
    da_ptr,
    h_ptr,
    dh_ptr,
    gate_ptr,
    grad_ptr,
    share_ptr,
    part_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    end_ptr,
    seed_ptr,
    num_rows,
    D,
    F,
    num_blocks,
    top_k,
    ACT: tl.constexpr,
    UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    DROPPED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """A tile of an expert's rows: from da, the gradient of y by down, to dh and gate * a.

    gate * a is written over da, and dh may be h: the largest buffers are then held once.
    share (B, N): da * a summed over a block of columns, for the gate.
    part (tiles, W + D), less where a bias is missing: sums over the tile's rows of dh for the first
    bias, of gate * grad for the second, which has programs of its own behind those of the hidden
    units. Rows go one after the other, so that a thread adds up its columns by itself.
    Bytes: reads N * (F + W), writes N * (F + W).
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:  # these rows were sent to no expert
        return
    first = tl.load(tile_start_ptr + tile)
    end = tl.minimum(first + HEIGHT, tl.load(end_ptr + expert)).to(tl.int32)
    W = 2 * F if ACT == "swiglu" else F
    sums = (W if UP_BIAS else 0) + (D if DOWN_BIAS else 0)
    part_ptr += tile.to(tl.int64) * sums
    if block < num_blocks:
        _differentiate(
            da_ptr, h_ptr, dh_ptr, gate_ptr, share_ptr + block.to(tl.int64) * num_rows, part_ptr,
            order_ptr, seed_ptr, first, end, block * BN, F, W, ACT, UP_BIAS, DROPPED, BM, BN,
        )  # fmt: skip
    else:
        _sum_gradient(
            grad_ptr, gate_ptr, part_ptr + sums - D, order_ptr, first, end,
            (block - num_blocks) * BN, D, top_k, BM, BN,
        )  # fmt: skip


@triton.jit
def _differentiate(
    da_ptr, h_ptr, dh_ptr, gate_ptr, share_ptr, part_ptr, order_ptr, seed_ptr, first, end,
    from_column, F, W, ACT: tl.constexpr, UP_BIAS: tl.constexpr, DROPPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    cols = from_column + tl.arange(0, BN)
    dh_sum = tl.zeros((BM, BN), dtype=tl.float32)
    du_sum = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(first, end, BM):
        rows = start + tl.arange(0, BM)
        inside = rows < end
        gate = _gate_of(rows, inside, gate_ptr, order_ptr)
        both = inside[:, None] & (cols < F)[None, :]
        da_ptrs = da_ptr + rows[:, None].to(tl.int64) * F + cols[None, :]
        place = rows[:, None].to(tl.int64) * W + cols[None, :]
        h_ptrs, dh_ptrs = h_ptr + place, dh_ptr + place
        da = tl.load(da_ptrs, mask=both, other=0.0).to(tl.float32)
        h = tl.load(h_ptrs, mask=both, other=0.0).to(tl.float32)
        u = h
        if ACT == "swiglu":
            u = tl.load(h_ptrs + F, mask=both, other=0.0).to(tl.float32)
        a, slope, slope_u = activate(h, u, ACT)
        if DROPPED > 0:
            keep = keep_tile(seed_ptr, rows, cols, DROPPED)
            a *= keep
            slope *= keep
            slope_u *= keep
        tl.store(share_ptr + rows, tl.sum(da * a, axis=1), mask=inside)
        d = da * gate[:, None]
        dh = d * slope
        tl.store(dh_ptrs, dh.to(h_ptr.dtype.element_ty), mask=both)
        tl.store(da_ptrs, (a * gate[:, None]).to(da_ptr.dtype.element_ty), mask=both)
        dh_sum += dh
        if ACT == "swiglu":
            du = d * slope_u
            tl.store(dh_ptrs + F, du.to(h_ptr.dtype.element_ty), mask=both)
            du_sum += du
    if UP_BIAS:
        tl.store(part_ptr + cols, tl.sum(dh_sum, axis=0), mask=cols < F)
        if ACT == "swiglu":
            tl.store(part_ptr + F + cols, tl.sum(du_sum, axis=0), mask=cols < F)


@triton.jit
def _sum_gradient(
    grad_ptr, gate_ptr, part_ptr, order_ptr, first, end, from_column, D, top_k, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """gate * grad of these rows' tokens, for the second bias."""
    cols = from_column + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(first, end, BM):
        rows = start + tl.arange(0, BM)
        inside = rows < end
        gate = _gate_of(rows, inside, gate_ptr, order_ptr)
        token = tl.load(order_ptr + rows, mask=inside, other=0) // top_k
        both = inside[:, None] & (cols < D)[None, :]
        grad = tl.load(grad_ptr + token[:, None] * D + cols[None, :], mask=both, other=0.0)
        total += grad.to(tl.float32) * gate[:, None]
    tl.store(part_ptr + cols, tl.sum(total, axis=0), mask=cols < D)


@triton.jit
def _gate_of(rows, inside, gate_ptr, order_ptr):
    place = tl.load(order_ptr + rows, mask=inside, other=0)
    return tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def finish_kernel(
    share_ptr,
    part_ptr,
    by_bias_ptr,
    dgate_ptr,
    up_ptr,
    down_ptr,
    order_ptr,
    expert_ptr,
    end_ptr,
    num_rows,
    num_blocks,
    num_experts,
    top_k,
    num_up,
    num_down,
    columns,
    HEIGHT: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Bias gradients, one program for an expert's `columns`th part; then the gate's, BM * BN rows.

    The gate's gradient (T, K): a row's shares added up, and what the second bias gives it: y holds
    that bias too. Zero for a row that was sent to no expert.
    """
    pid = tl.program_id(0)
    if pid < num_experts * columns:
        _add_biases(
            part_ptr, up_ptr, down_ptr, end_ptr, pid // columns, pid % columns * BN, num_experts,
            num_up, num_down, HEIGHT, BE, BM, BN,
        )  # fmt: skip
        return
    rows = (pid - num_experts * columns) * BM * BN + tl.arange(0, BM * BN)
    inside = rows < num_rows
    routed = rows < tl.load(end_ptr + num_experts - 1)
    total = tl.zeros((BM * BN,), dtype=tl.float32)
    share_ptrs = share_ptr + rows
    for _ in range(num_blocks):
        total += tl.load(share_ptrs, mask=routed, other=0.0)
        share_ptrs += num_rows
    place = tl.load(order_ptr + rows, mask=inside, other=0)
    if num_down > 0:
        expert = tl.load(expert_ptr + rows, mask=routed, other=0)
        at = place // top_k * num_experts + expert
        total += tl.load(by_bias_ptr + at, mask=routed, other=0.0).to(tl.float32)
    tl.store(dgate_ptr + place, total, mask=inside)


@triton.jit
def _add_biases(
    part_ptr, up_ptr, down_ptr, end_ptr, expert, from_column, num_experts, num_up, num_down,
    HEIGHT: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Each expert's tiles of part (tiles, num_up + num_down) added up."""
    cols = from_column + tl.arange(0, BN)
    sums = num_up + num_down
    first, mine, _ = tiles_before(end_ptr, expert, num_experts, HEIGHT, BE)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, mine, BM):
        step = start + tl.arange(0, BM)
        both = (step < mine)[:, None] & (cols < sums)[None, :]
        at = (first + step)[:, None].to(tl.int64) * sums + cols[None, :]
        total += tl.load(part_ptr + at, mask=both, other=0.0)
    found = tl.sum(total, axis=0).to(up_ptr.dtype.element_ty)
    tl.store(up_ptr + expert * num_up + cols, found, mask=cols < num_up)
    down_ptrs = down_ptr + expert * num_down + cols - num_up
    tl.store(down_ptrs, found, mask=(cols >= num_up) & (cols < sums))
