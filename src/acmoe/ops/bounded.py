"""Shrink huge tokens, so that a router's products, squares and sums of them stay finite.

X any leading dimensions, D features.
"""

import math

import torch
from torch import Tensor

from acmoe.ops.checks import host_may_read

BOUND = 2.0**32  # of float32


def bounded(x_XD: Tensor) -> Tensor:
    """Return x; a row whose largest absolute value exceeds the bound is shrunk to it.

    The bound is the fourth root of the dtype's range, 2^32 (about 4.3e9) for float32 and 2^256 for
    float64: the square of a number below it, times another square, is finite. A shrunk row keeps
    its direction. Every other row is multiplied by exactly 1, so that no bit of it changes. A row
    with NaN or infinity holds NaN afterwards.
    """
    if host_may_read(x_XD) and sums_are_bounded(x_XD):
        return x_XD
    bound = math.ldexp(1.0, _exponent(x_XD))
    return x_XD * (bound / largest_values(x_XD)[..., None]).clamp(max=1.0)


def largest_values(x_XD: Tensor) -> Tensor:
    """Return (X,): the largest absolute value of each row, NaN or inf if the row holds one."""
    largest_X: Tensor
    # Neither torch.compile nor the meta device can take the norm of no rows.
    if torch.compiler.is_compiling() or x_XD.is_meta:
        largest_X = x_XD.detach().abs().amax(dim=-1)
    else:
        largest_X = torch.linalg.vector_norm(x_XD.detach(), math.inf, dim=-1)
    return largest_X


def sums_are_bounded(*factors: Tensor) -> bool:
    """Return True if the factors are so small that no row of their product exceeds the bound.

    The host reads all of them. No value is larger than the root of the sum of all squares, which
    takes one pass and is NaN or inf where a value is. It is rounded, hence the half.
    """
    limit = math.ldexp(0.5, _exponent(factors[0]) // len(factors)) ** 2
    for one in factors:  # noqa: SIM110, `all` takes more of the host's time
        if not _sum_of_squares(one) <= limit:
            return False
    return True


def _sum_of_squares(x: Tensor) -> float:
    """Return the sum of all squares, or inf. A dot product takes two thirds of a norm's time."""
    x = x.detach()
    if not x.is_contiguous():
        return float(torch.linalg.vector_norm(x).item()) ** 2
    flat = x.view(-1)
    return float(torch.dot(flat, flat).item())


def _exponent(x: Tensor) -> int:
    return 256 if x.dtype == torch.float64 else 32
