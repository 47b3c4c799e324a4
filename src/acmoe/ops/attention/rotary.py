"""Rotation of feature pairs by angles that grow with the position: rotary position embedding.

Shapes: B batch, H heads, L positions, P features of a head, J = P / 2 feature pairs.
"""

import torch
from torch import Tensor


def rotation(position_L: Tensor, features: int) -> Tensor:
    """Return (2, L, J): cosine and sine of the angles position * 10,000^(-2j/P), P features.

    They have the dtype of the positions: float32, because at position 2,000 bfloat16 would be wrong
    by multiples of 2 pi.
    """
    half = features // 2
    pair_J = torch.arange(half, device=position_L.device, dtype=position_L.dtype)
    angle_LJ = position_L[:, None] * 10_000.0 ** (-pair_J / half)
    return torch.stack([angle_LJ.cos(), angle_LJ.sin()])


def rotate_by(x_BHLP: Tensor, rotation_2LJ: Tensor) -> Tensor:
    """Rotate features j and J + j of every row by the row's angle j."""
    cos_LJ, sin_LJ = rotation_2LJ
    left, right = x_BHLP.to(rotation_2LJ.dtype).chunk(2, dim=-1)
    rotated = torch.cat([left * cos_LJ - right * sin_LJ, left * sin_LJ + right * cos_LJ], dim=-1)
    return rotated.to(x_BHLP.dtype)
