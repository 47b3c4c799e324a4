"""Rescaled tokens, and the gradient of the tokens: the Triton form of ../rescaled.py.

A program holds whole rows, because a row whose largest value exceeds the bound is shrunk to it,
before and after it is rescaled. Its two factors are kept for the backward; they are 1 for any token
of ordinary size. Memory traffic: x read once, T D numbers written in float32 or in the dtype that
the caller rounds to; the backward reads as many and writes as many bytes as x has.

T tokens, D features, C clusters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.bounded import BOUND
from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

_ELEMENTS = 2048  # of a program, at least


def rescale_rows(
    x_TD: Tensor, scale_CD: Tensor | None, assignment_T: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x * scale (T, D), rounded to dtype, and the factors (2, T) by which rows were shrunk.

    scale: None for a scale of one.
    """
    y_TD = x_TD.new_empty(x_TD.shape, dtype=dtype)
    factor_2T = y_TD.new_empty(2, x_TD.shape[0], dtype=torch.float32)
    _launch(x_TD, scale_CD, assignment_T, factor_2T, y_TD, gradient=False)
    return y_TD, factor_2T


def rescale_gradient(
    grad_TD: Tensor,
    scale_CD: Tensor | None,
    assignment_T: Tensor | None,
    factor_2T: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of x (T, D) in its dtype."""
    out_TD = grad_TD.new_empty(grad_TD.shape, dtype=dtype)
    _launch(grad_TD, scale_CD, assignment_T, factor_2T, out_TD, gradient=True)
    return out_TD


def _launch(
    rows_TD: Tensor,
    scale_CD: Tensor | None,
    assignment_T: Tensor | None,
    factor_2T: Tensor,
    out_TD: Tensor,
    *,
    gradient: bool,
) -> None:
    T, D = rows_TD.shape
    width = next_power_of_2(D)
    rows = max(1, _ELEMENTS // width)
    scale = rows_TD if scale_CD is None else scale_CD
    cluster = rows_TD if assignment_T is None else assignment_T
    launch(
        _rescale_kernel, (cdiv(T, rows),), rows_TD, scale, cluster, factor_2T, out_TD, T, D,
        scale.shape[0], GRADIENT=gradient, HAS_SCALE=scale_CD is not None, BOUND=BOUND,
        BT=rows, BD=width, num_warps=min(16, max(4, width // 512)),
    )  # fmt: skip


@triton.jit
def _load_scale(
    scale_ptr, assignment_ptr, t, d, T, D, C, HAS_SCALE: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Load the scales (BT, BD) of rows; ones for a token in no cluster, or without a scale."""
    scale = tl.full((BT, BD), 1.0, dtype=tl.float32)
    if HAS_SCALE:
        cluster = tl.load(assignment_ptr + t, mask=t < T, other=-1)
        known = ((cluster >= 0) & (cluster < C))[:, None] & (d[None, :] < D)
        offs = cluster[:, None].to(tl.int64) * D + d[None, :]
        scale = tl.load(scale_ptr + offs, mask=known, other=1.0)
    return scale


@triton.jit
def _shrinking(y, BOUND: tl.constexpr):
    """Return the factor (BT,) by which a row is shrunk, 1 up to the bound; NaN if it holds NaN."""
    size = tl.abs(y)
    largest = tl.max(tl.where(size == size, size, 0.0), axis=1)
    has_nan = tl.max((size != size).to(tl.int32), axis=1) > 0
    factor = tl.where(largest > BOUND, BOUND / tl.maximum(largest, 1.0), 1.0)
    return tl.where(has_nan, float("nan"), factor)


@triton.jit
def _rescale_kernel(
    in_ptr, scale_ptr, assignment_ptr, factor_ptr, out_ptr, T, D, C, GRADIENT: tl.constexpr,
    HAS_SCALE: tl.constexpr, BOUND: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write BT rescaled tokens and their factors, or the gradient of the tokens by the factors."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    valid = (t < T)[:, None] & (d[None, :] < D)
    offs = t[:, None] * D + d[None, :]
    x = tl.load(in_ptr + offs, mask=valid, other=0.0).to(tl.float32)
    scale = _load_scale(scale_ptr, assignment_ptr, t, d, T, D, C, HAS_SCALE, BT, BD)
    if GRADIENT:
        before = tl.load(factor_ptr + t, mask=t < T, other=1.0)
        after = tl.load(factor_ptr + T + t, mask=t < T, other=1.0)
        y = x * after[:, None] * scale * before[:, None]
    else:
        before = _shrinking(x, BOUND)
        y = x * before[:, None] * scale
        after = _shrinking(tl.where(valid, y, 0.0), BOUND)
        y *= after[:, None]
        tl.store(factor_ptr + t, before, mask=t < T)
        tl.store(factor_ptr + T + t, after, mask=t < T)
    tl.store(out_ptr + offs, y.to(out_ptr.dtype.element_ty), mask=valid)
