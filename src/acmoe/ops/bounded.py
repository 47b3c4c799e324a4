"""Shrink huge tokens, so that a router's products, squares and sums of them stay finite.

X any leading dimensions, D features.
"""

import math

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager, transforming


def bounded(x_XD: Tensor) -> Tensor:
    """Return x; a row whose largest absolute value exceeds the bound is shrunk to it.

    The bound is the fourth root of the dtype's range, 2^32 (about 4.3e9) for float32 and 2^256 for
    float64: the square of a number below it, times another square, is finite. A shrunk row keeps
    its direction. Every other row is multiplied by exactly 1, so that no bit of it changes. A row
    with NaN or infinity holds NaN afterwards.
    """
    bound = math.ldexp(1.0, 256 if x_XD.dtype == torch.float64 else 32)
    if _inside(x_XD, bound):
        return x_XD
    largest_X1: Tensor
    if torch.compiler.is_compiling():  # it cannot trace the norm of no rows
        largest_X1 = x_XD.detach().abs().amax(dim=-1, keepdim=True)
    else:
        largest_X1 = torch.linalg.vector_norm(x_XD.detach(), math.inf, dim=-1, keepdim=True)
    return x_XD * (bound / largest_X1).clamp(max=1.0)


def _inside(x_XD: Tensor, bound: float) -> bool:
    """Return True if the host knows that no row exceeds the bound: on a CPU, where it may look."""
    if x_XD.device.type != "cpu" or x_XD.numel() == 0 or transforming() or not eager(x_XD):
        return False
    low, high = torch.aminmax(x_XD.detach())
    return -bound <= low.item() and high.item() <= bound  # NaN is not
