"""Residual addition fused with one or two layer norms, for the post-norm transformer block.

    add_norm         out (T, D) = norm(x + branch)
    add_norm_twice   out (T, D) = norm(x + inner_norm(x + dropout(branch)))

A program holds whole rows in registers, so the forward reads the two tensors and writes the result;
the backward recomputes everything else from them and from the saved mean and rstd of each row. Each
backward program loops over rows and accumulates the gradients of gains and biases;
`reduce_partials` reduces the programs' partial sums in a fixed order.

Memory traffic for float32 x and 16-bit branches: forward 10 T D bytes, and 2 T D for a copy of the
result in 16 bits; backward 16 T D, plus 2 T D for that copy's gradient and 4 T D for the gradient
of a gradient alias. A gradient alias (ops/norm/op.py) is passed to a later op in place of the
result, so that the gradient of that use arrives as a separate tensor and is added here, not in
another pass.

T tokens, D features, BM rows of a tile, BD features padded to a power of two.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dropout_rng import keep_scale


@triton.jit
def _features(BD: tl.constexpr):
    """Return the feature indices, declared contiguous in fours.

    16-bit and 32-bit tensors then get the same thread layout, and no element changes threads.
    """
    return tl.max_contiguous(tl.arange(0, BD), 4)


@triton.jit
def _load_tile(base, row, d, T, D):
    """Load a (BM, BD) tile as float32; zeros out of bounds."""
    valid = (row[:, None] < T) & (d[None, :] < D)
    return tl.load(base + row.to(tl.int64)[:, None] * D + d[None, :], mask=valid, other=0.0).to(
        tl.float32
    )


@triton.jit
def _store_tile(base, tile, row, d, T, D):
    """Store a (BM, BD) tile in the tensor's dtype."""
    valid = (row[:, None] < T) & (d[None, :] < D)
    ptrs = base + row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=valid)


@triton.jit
def _load_row(base, d, D):
    """Load a (1, BD) parameter row as float32."""
    return tl.load(base + d, mask=d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _compute_stats(s, stats_ptr, row, d, T, D, eps):
    """Return mean and rstd (1 / standard deviation) of rows; store both for the backward."""
    mean = tl.sum(s, axis=1) / D
    centered = tl.where((d < D)[None, :], s - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / D + eps)
    tl.store(stats_ptr + row, mean, mask=row < T)
    tl.store(stats_ptr + T + row, rstd, mask=row < T)
    return mean, rstd


@triton.jit
def _load_stats(stats_ptr, row, T):
    """Load the saved mean and rstd of rows."""
    mean = tl.load(stats_ptr + row, mask=row < T, other=0.0)
    return mean, tl.load(stats_ptr + T + row, mask=row < T, other=0.0)


@triton.jit
def _normalize(s, mean, rstd, d, D):
    """Return (s - mean) * rstd; zeros beyond the features."""
    return tl.where((d < D)[None, :], (s - mean[:, None]) * rstd[:, None], 0.0)


@triton.jit
def _norm_backward(grad, normalized, gain, rstd, D):
    """Return the gradient of a layer norm's input from that of its output."""
    g = grad * gain
    mean_g_normalized = tl.sum(g * normalized, axis=1) / D
    mean_g = tl.sum(g, axis=1) / D
    return (g - mean_g[:, None] - normalized * mean_g_normalized[:, None]) * rstd[:, None]


@triton.jit
def add_norm_kernel(
    x_ptr, branch_ptr, gain_ptr, bias_ptr, out_ptr, low_ptr, stats_ptr, T, D, eps,
    LOW: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out = norm(x + branch). LOW: also store the result in low precision."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = _features(BD)
    s = _load_tile(x_ptr, row, d, T, D) + _load_tile(branch_ptr, row, d, T, D)
    mean, rstd = _compute_stats(s, stats_ptr, row, d, T, D, eps)
    normalized = _normalize(s, mean, rstd, d, D)
    out = normalized * _load_row(gain_ptr, d, D) + _load_row(bias_ptr, d, D)
    _store_tile(out_ptr, out, row, d, T, D)
    if LOW:
        _store_tile(low_ptr, out, row, d, T, D)


@triton.jit
def add_norm_backward_kernel(
    grad_ptr, low_grad_ptr, alias_grad_ptr, x_ptr, branch_ptr, gain_ptr, stats_ptr, dx_ptr,
    dbranch_ptr, partial_ptr, T, D,
    LOW: tl.constexpr, ALIAS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write d x and d branch, and partials (programs, 2, D): summed gradients of gain and bias.

    The upstream gradient is grad, plus low_grad of the low-precision copy (LOW), plus alias_grad of
    the gradient alias (ALIAS).
    """
    d = _features(BD)
    dgain = tl.zeros((BM, BD), tl.float32)
    dbias = tl.zeros((BM, BD), tl.float32)
    for start in range(tl.program_id(0) * BM, T, tl.num_programs(0) * BM):
        row = start + tl.arange(0, BM)
        grad = _load_tile(grad_ptr, row, d, T, D)
        if ALIAS:
            grad += _load_tile(alias_grad_ptr, row, d, T, D)
        if LOW:
            grad += _load_tile(low_grad_ptr, row, d, T, D)
        s = _load_tile(x_ptr, row, d, T, D) + _load_tile(branch_ptr, row, d, T, D)
        mean, rstd = _load_stats(stats_ptr, row, T)
        normalized = _normalize(s, mean, rstd, d, D)
        dgain += grad * normalized
        dbias += grad
        ds = _norm_backward(grad, normalized, _load_row(gain_ptr, d, D), rstd, D)
        _store_tile(dx_ptr, ds, row, d, T, D)
        _store_tile(dbranch_ptr, ds, row, d, T, D)
    partial_ptr += tl.program_id(0) * 2 * D
    tl.store(partial_ptr + d, tl.sum(dgain, axis=0), mask=d < D)
    tl.store(partial_ptr + D + d, tl.sum(dbias, axis=0), mask=d < D)


@triton.jit
def _apply_dropout(tile, seed_ptr, row, d, DROP_THRESHOLD: tl.constexpr):
    """Multiply by the dropout keep mask, if there is dropout."""
    if DROP_THRESHOLD > 0:
        tile *= keep_scale(seed_ptr, row, d, DROP_THRESHOLD)
    return tile


@triton.jit
def add_norm_twice_kernel(
    x_ptr, branch_ptr, inner_gain_ptr, inner_bias_ptr, gain_ptr, bias_ptr, seed_ptr, out_ptr,
    low_ptr, stats_ptr, T, D, inner_eps, eps,
    LOW: tl.constexpr, DROP_THRESHOLD: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out = norm(x + inner_norm(x + dropout(branch))). LOW: as in `add_norm_kernel`."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = _features(BD)
    x = _load_tile(x_ptr, row, d, T, D)
    s = x + _apply_dropout(_load_tile(branch_ptr, row, d, T, D), seed_ptr, row, d, DROP_THRESHOLD)
    mean, rstd = _compute_stats(s, stats_ptr, row, d, T, D, inner_eps)
    normalized = _normalize(s, mean, rstd, d, D)
    s = x + normalized * _load_row(inner_gain_ptr, d, D) + _load_row(inner_bias_ptr, d, D)
    mean, rstd = _compute_stats(s, stats_ptr + 2 * T, row, d, T, D, eps)
    normalized = _normalize(s, mean, rstd, d, D)
    out = normalized * _load_row(gain_ptr, d, D) + _load_row(bias_ptr, d, D)
    _store_tile(out_ptr, out, row, d, T, D)
    if LOW:
        _store_tile(low_ptr, out, row, d, T, D)


@triton.jit
def add_norm_twice_backward_kernel(
    grad_ptr, low_grad_ptr, x_ptr, branch_ptr, inner_gain_ptr, inner_bias_ptr, gain_ptr, seed_ptr,
    stats_ptr, dx_ptr, dbranch_ptr, partial_ptr, T, D,
    LOW: tl.constexpr, DROP_THRESHOLD: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write d x and d branch, and partials (programs, 4, D): gain and bias, inner norm first.

    LOW: as in `add_norm_backward_kernel`.
    """
    d = _features(BD)
    dinner_gain = tl.zeros((BM, BD), tl.float32)
    dinner_bias = tl.zeros((BM, BD), tl.float32)
    dgain = tl.zeros((BM, BD), tl.float32)
    dbias = tl.zeros((BM, BD), tl.float32)
    for start in range(tl.program_id(0) * BM, T, tl.num_programs(0) * BM):
        row = start + tl.arange(0, BM)
        grad = _load_tile(grad_ptr, row, d, T, D)
        if LOW:
            grad += _load_tile(low_grad_ptr, row, d, T, D)
        x = _load_tile(x_ptr, row, d, T, D)
        s = x + _apply_dropout(
            _load_tile(branch_ptr, row, d, T, D), seed_ptr, row, d, DROP_THRESHOLD
        )
        mean, inner_rstd = _load_stats(stats_ptr, row, T)
        inner = _normalize(s, mean, inner_rstd, d, D)
        inner_gain = _load_row(inner_gain_ptr, d, D)
        s = x + inner * inner_gain + _load_row(inner_bias_ptr, d, D)
        mean, rstd = _load_stats(stats_ptr + 2 * T, row, T)
        normalized = _normalize(s, mean, rstd, d, D)
        dgain += grad * normalized
        dbias += grad
        ds = _norm_backward(grad, normalized, _load_row(gain_ptr, d, D), rstd, D)
        dinner_gain += ds * inner
        dinner_bias += ds
        dinner = _norm_backward(ds, inner, inner_gain, inner_rstd, D)
        _store_tile(dx_ptr, ds + dinner, row, d, T, D)
        dinner = _apply_dropout(dinner, seed_ptr, row, d, DROP_THRESHOLD)
        _store_tile(dbranch_ptr, dinner, row, d, T, D)
    partial_ptr += tl.program_id(0) * 4 * D
    tl.store(partial_ptr + d, tl.sum(dinner_gain, axis=0), mask=d < D)
    tl.store(partial_ptr + D + d, tl.sum(dinner_bias, axis=0), mask=d < D)
    tl.store(partial_ptr + 2 * D + d, tl.sum(dgain, axis=0), mask=d < D)
    tl.store(partial_ptr + 3 * D + d, tl.sum(dbias, axis=0), mask=d < D)
