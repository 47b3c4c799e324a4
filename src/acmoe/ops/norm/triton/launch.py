"""Launch functions of the kernels in norm.py: grids, output buffers, and reduction of partial sums.

T tokens, D features.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from acmoe.ops.device.dropout_rng import drop_threshold
from acmoe.ops.device.reduce_partials import reduce_partials
from acmoe.ops.norm.triton.norm import (
    add_norm_backward_kernel,
    add_norm_kernel,
    add_norm_twice_backward_kernel,
    add_norm_twice_kernel,
)

_ROWS = _WARPS = 1  # one row per warp: reductions are shuffles, without barriers
# Programs of the backward kernels, each of which writes partial sums: as many as an H200 runs at a
# time on its 132 multiprocessors. 16 per multiprocessor; 15 with a gradient alias, whose rows take
# more registers; 8 for two norms.
_PROGRAMS = {"once": 2112, "alias": 1980, "twice": 1056}


def _blocks(D: int) -> dict[str, int]:
    """Tile sizes and warps of all kernels."""
    return {"BM": _ROWS, "BD": triton.next_power_of_2(D), "num_warps": _WARPS}


def run_add_norm(
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm(x + branch) (T, D), a copy of it in dtype `low`, and (2, T) mean and rstd.

    The copy has 0 rows where `low` is None.
    """
    T, D = x.shape
    out, stats = x.new_empty(T, D, dtype=dtype), x.new_empty(2, T, dtype=torch.float32)
    out_low = x.new_empty(0 if low is None else T, D, dtype=low or dtype)
    add_norm_kernel[(triton.cdiv(T, _ROWS),)](
        *(x, branch, gain, bias, out, out_low, stats, T, D, eps), LOW=low is not None, **_blocks(D)
    )
    return out, out_low, stats


def run_add_norm_backward(
    grad: Tensor,
    low_grad: Tensor | None,
    alias_grad: Tensor | None,
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the branch (T, D), and of gain and bias (2, D).

    low_grad: gradient of the low-precision copy. alias_grad: gradient that comes through the
    gradient alias of the result (ops/norm/op.py).
    """
    T, D = x.shape
    dx, dbranch = torch.empty_like(x), torch.empty_like(branch)
    kind = "once" if alias_grad is None else "alias"
    programs = min(_PROGRAMS[kind], triton.cdiv(T, _ROWS))
    partials = x.new_empty(1, programs, 2 * D, dtype=torch.float32)
    other_grads = (
        grad if other_grad is None else other_grad for other_grad in (low_grad, alias_grad)
    )
    add_norm_backward_kernel[(programs,)](
        *(grad, *other_grads, x, branch, gain, stats, dx, dbranch, partials, T, D),
        LOW=low_grad is not None,
        ALIAS=alias_grad is not None,
        **_blocks(D),
    )
    return dx, dbranch, reduce_partials(partials)[0].view(2, D)


def run_add_norm_twice(
    x: Tensor,
    branch: Tensor,
    inner: tuple[Tensor, Tensor, float],
    outer: tuple[Tensor, Tensor, float],
    seed: Tensor,
    dropout: float,
    dtype: torch.dtype,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm(x + inner_norm(x + dropout(branch))), its copy in `low`, and (4, T) statistics.

    inner, outer: gain, bias and epsilon of each norm. The statistics are mean and rstd of the inner
    norm, then of the outer one. The copy is as in `run_add_norm`.
    """
    T, D = x.shape
    out, stats = x.new_empty(T, D, dtype=dtype), x.new_empty(4, T, dtype=torch.float32)
    out_low = x.new_empty(0 if low is None else T, D, dtype=low or dtype)
    add_norm_twice_kernel[(triton.cdiv(T, _ROWS),)](
        *(x, branch, *inner[:2], *outer[:2], seed, out, out_low, stats, T, D, inner[2], outer[2]),
        LOW=low is not None, DROP_THRESHOLD=drop_threshold(dropout), **_blocks(D),
    )  # fmt: skip
    return out, out_low, stats


class SavedTwice(NamedTuple):
    """The tensors that `run_add_norm_twice` leaves to its backward."""

    x: Tensor  # (T, D)
    branch: Tensor  # (T, D)
    inner_gain: Tensor  # (D,)
    inner_bias: Tensor  # (D,)
    gain: Tensor  # (D,)
    seed: Tensor
    stats: Tensor  # (4, T)


def run_add_norm_twice_backward(
    grad: Tensor, low_grad: Tensor | None, saved: SavedTwice, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and branch (T, D), and of gains and biases (4, D), inner first."""
    x, branch, inner_gain, inner_bias, gain, seed, stats = saved
    T, D = x.shape
    dx, dbranch = torch.empty_like(x), torch.empty_like(branch)
    programs = min(_PROGRAMS["twice"], triton.cdiv(T, _ROWS))
    partials = x.new_empty(1, programs, 4 * D, dtype=torch.float32)
    add_norm_twice_backward_kernel[(programs,)](
        *(grad, grad if low_grad is None else low_grad, x, branch, inner_gain, inner_bias, gain),
        *(seed, stats, dx, dbranch, partials, T, D),
        LOW=low_grad is not None,
        DROP_THRESHOLD=drop_threshold(dropout),
        **_blocks(D),
    )
    return dx, dbranch, reduce_partials(partials)[0].view(4, D)
