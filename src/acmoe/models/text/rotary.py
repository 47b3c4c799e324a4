"""Rotary position embedding.

Shapes: B batch, H heads, L positions, P features of a head, J = P / 2 feature pairs.
"""

import torch
from torch import Tensor


def rotate(x_BHLP: Tensor, first: int | Tensor) -> Tensor:
    """Rotate the feature pairs of row i by the angle (first + i) * 10,000^(-2j/P).

    first: a whole number; as a tensor () it may differ in each replay of a captured graph.
    """
    half = x_BHLP.shape[-1] // 2
    wide = torch.float64 if x_BHLP.dtype == torch.float64 else torch.float32
    position_L = (torch.arange(x_BHLP.shape[-2], device=x_BHLP.device) + first).to(wide)
    pair_J = torch.arange(half, device=x_BHLP.device, dtype=wide)
    angle_LJ = position_L[:, None] * 10_000.0 ** (-pair_J / half)
    # The angle needs float32: at position 2,000 bfloat16 would be wrong by multiples of 2 pi.
    cos_LJ, sin_LJ = angle_LJ.cos(), angle_LJ.sin()
    left, right = x_BHLP.to(wide).chunk(2, dim=-1)
    rotated = torch.cat([left * cos_LJ - right * sin_LJ, left * sin_LJ + right * cos_LJ], dim=-1)
    return rotated.to(x_BHLP.dtype)
