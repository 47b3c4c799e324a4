"""Rows of unit length, for routers that compare directions.

X any leading dimensions, D features.
"""

import torch
from torch import Tensor, nn

# Shorter rows are divided by this instead of their length, which bounds the gradient.
SHORTEST = 1e-6


def unit_rows(x_XD: Tensor) -> Tensor:
    """Return x / |x| for each row; a row of zeros stays zero and has gradient 0.

    A row shorter than 1e-6 is divided by 1e-6. The gradient of x / |x| grows as 1 / |x|: that of
    `torch.nn.functional.normalize` at zero is 1e12, which no 16-bit number can hold.
    """
    zero_X1 = torch.linalg.vector_norm(x_XD.detach(), dim=-1, keepdim=True) == 0
    # Zeros become ones and zeros again, so that no derivative, of any order, is taken at zero.
    safe_XD = x_XD.masked_fill(zero_X1, 1.0)
    unit_XD = nn.functional.normalize(safe_XD, dim=-1, eps=SHORTEST)
    return unit_XD.masked_fill(zero_X1, 0.0)
