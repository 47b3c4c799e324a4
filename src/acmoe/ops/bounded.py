"""Shrink huge tokens, so that a router's products, squares and sums of them stay finite.

X any leading dimensions, D features.
"""

import math

import torch
from torch import Tensor


def bounded(x_XD: Tensor) -> Tensor:
    """Return x; a row whose largest absolute value exceeds the bound is shrunk to it.

    The bound is the fourth root of the dtype's range, 2^32 (about 4.3e9) for float32 and 2^256 for
    float64: the square of a number below it, times another square, is finite. A shrunk row keeps
    its direction. Every other row is multiplied by exactly 1, so that no bit of it changes. A row
    with NaN or infinity holds NaN afterwards.
    """
    bound = math.ldexp(1.0, 256 if x_XD.dtype == torch.float64 else 32)
    largest_X1: Tensor = torch.linalg.vector_norm(x_XD.detach(), math.inf, dim=-1, keepdim=True)
    return x_XD * (bound / largest_X1).clamp(max=1.0)
