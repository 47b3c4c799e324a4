"""Sums and layer norms around the parts of a post-norm block, a row of each tensor at a time.

    once     norm(x + branch)
    twice    norm(x + inner norm(x + dropout(branch)))

Between them lies nothing but a row, so a pass reads the two tensors and writes the sum; the
backward computes everything else again from them. Gradients of gains and biases: every program adds
up its own rows, `totals` the programs, in a fixed order.

Bytes, for float32 x and branches of 16 bits: forward 10 T D, and 2 for a copy in 16 bits; backward
16 T D, 2 for the gradient of that copy and 4 for that of an echo.

T tokens, D features, BM rows of a tile, BD features filled up to a power of two.
"""

import triton
import triton.language as tl

from acmoe.ops.device.dropout_rng import keep_tile


@triton.jit
def _features(BD: tl.constexpr):
    """Said to lie in fours, so that numbers of 16 and of 32 bits are spread alike over the threads
    and none has to change its place."""
    return tl.max_contiguous(tl.arange(0, BD), 4)


@triton.jit
def _load_tile(base, row, d, T, D):
    """A tile in float32; zeros beyond the tokens and the features."""
    known = (row[:, None] < T) & (d[None, :] < D)
    return tl.load(base + row.to(tl.int64)[:, None] * D + d[None, :], mask=known, other=0.0).to(
        tl.float32
    )


@triton.jit
def _store_tile(base, tile, row, d, T, D):
    known = (row[:, None] < T) & (d[None, :] < D)
    at = base + row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=known)


@triton.jit
def _load_row(base, d, D):
    return tl.load(base + d, mask=d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _statistics(s, stat_ptr, row, d, T, D, eps):
    """Mean and reciprocal deviation of rows, also written, for the backward."""
    mean = tl.sum(s, axis=1) / D
    apart = tl.where((d < D)[None, :], s - mean[:, None], 0.0)
    steep = 1.0 / tl.sqrt(tl.sum(apart * apart, axis=1) / D + eps)
    tl.store(stat_ptr + row, mean, mask=row < T)
    tl.store(stat_ptr + T + row, steep, mask=row < T)
    return mean, steep


@triton.jit
def _load_statistics(stat_ptr, row, T):
    mean = tl.load(stat_ptr + row, mask=row < T, other=0.0)
    return mean, tl.load(stat_ptr + T + row, mask=row < T, other=0.0)


@triton.jit
def _standard(s, mean, steep, d, D):
    """Standardized rows; zeros beyond the features."""
    return tl.where((d < D)[None, :], (s - mean[:, None]) * steep[:, None], 0.0)


@triton.jit
def _slope(grad, standard, gain, steep, D):
    """Gradient of what a norm was given, from that of what it gave."""
    g = grad * gain
    along = tl.sum(g * standard, axis=1) / D
    level = tl.sum(g, axis=1) / D
    return (g - level[:, None] - standard * along[:, None]) * steep[:, None]


@triton.jit
def once_kernel(
    x_ptr, branch_ptr, gain_ptr, bias_ptr, out_ptr, low_ptr, stat_ptr, T, D, eps,
    LOW: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """LOW: the result is written a second time, in the precision of products."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = _features(BD)
    s = _load_tile(x_ptr, row, d, T, D) + _load_tile(branch_ptr, row, d, T, D)
    mean, steep = _statistics(s, stat_ptr, row, d, T, D, eps)
    standard = _standard(s, mean, steep, d, D)
    out = standard * _load_row(gain_ptr, d, D) + _load_row(bias_ptr, d, D)
    _store_tile(out_ptr, out, row, d, T, D)
    if LOW:
        _store_tile(low_ptr, out, row, d, T, D)


@triton.jit
def once_backward_kernel(
    grad_ptr, low_grad_ptr, echo_grad_ptr, x_ptr, branch_ptr, gain_ptr, stat_ptr, dx_ptr,
    dbranch_ptr, part_ptr, T, D,
    LOW: tl.constexpr, ECHO: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """part (programs, 2, D): sums of the rows' gradients for gain and bias.

    LOW, ECHO: the gradient is a sum, with that of the copy in low precision, of the echo.
    """
    d = _features(BD)
    dgain = tl.zeros((BM, BD), tl.float32)
    dbias = tl.zeros((BM, BD), tl.float32)
    for start in range(tl.program_id(0) * BM, T, tl.num_programs(0) * BM):
        row = start + tl.arange(0, BM)
        grad = _load_tile(grad_ptr, row, d, T, D)
        if ECHO:
            grad += _load_tile(echo_grad_ptr, row, d, T, D)
        if LOW:
            grad += _load_tile(low_grad_ptr, row, d, T, D)
        s = _load_tile(x_ptr, row, d, T, D) + _load_tile(branch_ptr, row, d, T, D)
        mean, steep = _load_statistics(stat_ptr, row, T)
        standard = _standard(s, mean, steep, d, D)
        dgain += grad * standard
        dbias += grad
        ds = _slope(grad, standard, _load_row(gain_ptr, d, D), steep, D)
        _store_tile(dx_ptr, ds, row, d, T, D)
        _store_tile(dbranch_ptr, ds, row, d, T, D)
    part_ptr += tl.program_id(0) * 2 * D
    tl.store(part_ptr + d, tl.sum(dgain, axis=0), mask=d < D)
    tl.store(part_ptr + D + d, tl.sum(dbias, axis=0), mask=d < D)


@triton.jit
def _dropped(tile, seed_ptr, row, d, DROPPED: tl.constexpr):
    if DROPPED > 0:
        tile *= keep_tile(seed_ptr, row, d, DROPPED)
    return tile


@triton.jit
def twice_kernel(
    x_ptr, branch_ptr, inner_gain_ptr, inner_bias_ptr, gain_ptr, bias_ptr, seed_ptr, out_ptr,
    low_ptr, stat_ptr, T, D, inner_eps, eps,
    LOW: tl.constexpr, DROPPED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """LOW as in `once_kernel`."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = _features(BD)
    x = _load_tile(x_ptr, row, d, T, D)
    s = x + _dropped(_load_tile(branch_ptr, row, d, T, D), seed_ptr, row, d, DROPPED)
    mean, steep = _statistics(s, stat_ptr, row, d, T, D, inner_eps)
    standard = _standard(s, mean, steep, d, D)
    s = x + standard * _load_row(inner_gain_ptr, d, D) + _load_row(inner_bias_ptr, d, D)
    mean, steep = _statistics(s, stat_ptr + 2 * T, row, d, T, D, eps)
    standard = _standard(s, mean, steep, d, D)
    out = standard * _load_row(gain_ptr, d, D) + _load_row(bias_ptr, d, D)
    _store_tile(out_ptr, out, row, d, T, D)
    if LOW:
        _store_tile(low_ptr, out, row, d, T, D)


@triton.jit
def twice_backward_kernel(
    grad_ptr, low_grad_ptr, x_ptr, branch_ptr, inner_gain_ptr, inner_bias_ptr, gain_ptr, seed_ptr,
    stat_ptr, dx_ptr, dbranch_ptr, part_ptr, T, D,
    LOW: tl.constexpr, DROPPED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """part (programs, 4, D): for gain and bias of the inner norm, then of the outer one.

    LOW as in `once_backward_kernel`.
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
        s = x + _dropped(_load_tile(branch_ptr, row, d, T, D), seed_ptr, row, d, DROPPED)
        mean, inner_steep = _load_statistics(stat_ptr, row, T)
        inner = _standard(s, mean, inner_steep, d, D)
        inner_gain = _load_row(inner_gain_ptr, d, D)
        s = x + inner * inner_gain + _load_row(inner_bias_ptr, d, D)
        mean, steep = _load_statistics(stat_ptr + 2 * T, row, T)
        standard = _standard(s, mean, steep, d, D)
        dgain += grad * standard
        dbias += grad
        ds = _slope(grad, standard, _load_row(gain_ptr, d, D), steep, D)
        dinner_gain += ds * inner
        dinner_bias += ds
        dinner = _slope(ds, inner, inner_gain, inner_steep, D)
        _store_tile(dx_ptr, ds + dinner, row, d, T, D)
        dinner = _dropped(dinner, seed_ptr, row, d, DROPPED)
        _store_tile(dbranch_ptr, dinner, row, d, T, D)
    part_ptr += tl.program_id(0) * 4 * D
    tl.store(part_ptr + d, tl.sum(dinner_gain, axis=0), mask=d < D)
    tl.store(part_ptr + D + d, tl.sum(dinner_bias, axis=0), mask=d < D)
    tl.store(part_ptr + 2 * D + d, tl.sum(dgain, axis=0), mask=d < D)
    tl.store(part_ptr + 3 * D + d, tl.sum(dbias, axis=0), mask=d < D)
