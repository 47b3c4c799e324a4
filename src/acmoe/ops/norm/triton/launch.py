"""Launches of the kernels of norm.py: grids, buffers, and sums of what programs leave.

T tokens, D features.
"""

import torch
import triton
from torch import Tensor

from acmoe.ops.device.dropout_rng import threshold
from acmoe.ops.device.reduce_partials import totals
from acmoe.ops.norm.triton.norm import (
    once_backward_kernel,
    once_kernel,
    twice_backward_kernel,
    twice_kernel,
)

_ROWS = _WARPS = 1  # a row to a warp: its sums are shuffles, and no warp waits for another
# Of the backwards, each with sums of its own to write: as many as an H200 runs at one time, 16 on
# each of 132 processors, 15 with an echo, whose rows take more registers, and 8.
_PROGRAMS = {"once": 2112, "echo": 1980, "twice": 1056}


def _blocks(D: int) -> dict[str, int]:
    return {"BM": _ROWS, "BD": triton.next_power_of_2(D), "num_warps": _WARPS}


def run_once(
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, D) norm of the sum, the same in `low`, and (2, T) statistics for the backward.

    Of the second there are no rows where `low` is None.
    """
    T, D = x.shape
    out, stat = x.new_empty(T, D, dtype=dtype), x.new_empty(2, T, dtype=torch.float32)
    again = x.new_empty(0 if low is None else T, D, dtype=low or dtype)
    once_kernel[(triton.cdiv(T, _ROWS),)](
        *(x, branch, gain, bias, out, again, stat, T, D, eps), LOW=low is not None, **_blocks(D)
    )
    return out, again, stat


def run_once_backward(
    grad: Tensor,
    low_grad: Tensor | None,
    echo_grad: Tensor | None,
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    stat: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the branch, and (2, D) of gain and bias."""
    T, D = x.shape
    dx, dbranch = torch.empty_like(x), torch.empty_like(branch)
    kind = "once" if echo_grad is None else "echo"
    programs = min(_PROGRAMS[kind], triton.cdiv(T, _ROWS))
    part = x.new_empty(1, programs, 2 * D, dtype=torch.float32)
    others = (grad if other is None else other for other in (low_grad, echo_grad))
    once_backward_kernel[(programs,)](
        *(grad, *others, x, branch, gain, stat, dx, dbranch, part, T, D),
        LOW=low_grad is not None,
        ECHO=echo_grad is not None,
        **_blocks(D),
    )
    return dx, dbranch, totals(part)[0].view(2, D)


def run_twice(
    x: Tensor,
    branch: Tensor,
    inner: tuple[Tensor, Tensor, float],
    outer: tuple[Tensor, Tensor, float],
    seed: Tensor,
    dropout: float,
    dtype: torch.dtype,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, D) norm of x + inner norm, the same in `low`, and (4, T) statistics; see `run_once`.

    A norm is gain, bias, epsilon.
    """
    T, D = x.shape
    out, stat = x.new_empty(T, D, dtype=dtype), x.new_empty(4, T, dtype=torch.float32)
    again = x.new_empty(0 if low is None else T, D, dtype=low or dtype)
    twice_kernel[(triton.cdiv(T, _ROWS),)](
        *(x, branch, *inner[:2], *outer[:2], seed, out, again, stat, T, D, inner[2], outer[2]),
        LOW=low is not None, DROPPED=threshold(dropout), **_blocks(D),
    )  # fmt: skip
    return out, again, stat


def run_twice_backward(
    grad: Tensor,
    low_grad: Tensor | None,
    x: Tensor,
    branch: Tensor,
    inner_gain: Tensor,
    inner_bias: Tensor,
    gain: Tensor,
    seed: Tensor,
    stat: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the branch, and (4, D) of gain and bias, inner norm first."""
    T, D = x.shape
    dx, dbranch = torch.empty_like(x), torch.empty_like(branch)
    programs = min(_PROGRAMS["twice"], triton.cdiv(T, _ROWS))
    part = x.new_empty(1, programs, 4 * D, dtype=torch.float32)
    twice_backward_kernel[(programs,)](
        *(grad, grad if low_grad is None else low_grad, x, branch, inner_gain, inner_bias, gain),
        *(seed, stat, dx, dbranch, part, T, D),
        LOW=low_grad is not None,
        DROPPED=threshold(dropout),
        **_blocks(D),
    )
    return dx, dbranch, totals(part)[0].view(4, D)
