"""Rows of unit length, and their gradient: the Triton form of ops/unit.py.

    u = x / max(|x|, shortest)
    dx = (du - u (u . du)) / |x|     du / shortest for a shorter row, 0 for a row of zeros

A program holds whole rows. Memory traffic: x read and u written once; the backward reads x and du
and writes dx.

X rows, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

_ELEMENTS = 2048  # of a program, at least


def launch_unit_rows(x_XD: Tensor, grad_XD: Tensor | None, shortest: float) -> Tensor:
    """Return the rows of unit length or, if their gradient is given, that of x."""
    D = x_XD.shape[-1]
    rows, width = x_XD.numel() // D, next_power_of_2(D)
    out_XD = torch.empty_like(x_XD)
    height = max(1, _ELEMENTS // width)
    launch(
        _unit_kernel, (cdiv(rows, height),), x_XD, grad_XD, out_XD, rows, D, shortest,
        BX=height, BD=width, num_warps=min(16, max(4, width // 512)),
    )  # fmt: skip
    return out_XD


@triton.jit
def _unit_kernel(x_ptr, grad_ptr, out_ptr, X, D, shortest, BX: tl.constexpr, BD: tl.constexpr):
    """Write BX rows of unit length, or the gradient of the rows."""
    row, d = tl.program_id(0).to(tl.int64) * BX + tl.arange(0, BX), tl.arange(0, BD)
    valid = (row < X)[:, None] & (d[None, :] < D)
    offs = row[:, None] * D + d[None, :]
    x = tl.load(x_ptr + offs, mask=valid, other=0.0)
    length = tl.sqrt(tl.sum(x * x, axis=1))
    divisor = tl.maximum(length, shortest)  # of NaN and a number, the maximum may be the number
    divisor = tl.where(length == length, divisor, length)
    unit = x / divisor[:, None]
    if grad_ptr is None:
        found = unit
    else:
        grad = tl.load(grad_ptr + offs, mask=valid, other=0.0)
        along = tl.where(length < shortest, 0.0, tl.sum(unit * grad, axis=1))
        found = (grad - unit * along[:, None]) / divisor[:, None]
    # A row whose squares are all below the least number counts as zeros, too.
    tl.store(out_ptr + offs, tl.where(length[:, None] == 0, 0.0, found), mask=valid)
