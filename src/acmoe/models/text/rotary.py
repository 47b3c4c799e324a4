"""Rotary position embedding.

Shapes: B batch, H heads, L positions, P features of a head.
"""

import torch
from torch import Tensor

from acmoe.ops.attention.rotary import rotate_by, rotation


def rotate(x_BHLP: Tensor, first: int | Tensor) -> Tensor:
    """Rotate the feature pairs of row i by the angle (first + i) * 10,000^(-2j/P).

    first: a whole number; as a tensor () it may differ in each replay of a captured graph.
    """
    position_L = torch.arange(x_BHLP.shape[-2], device=x_BHLP.device) + first
    wide = torch.float64 if x_BHLP.dtype == torch.float64 else torch.float32
    return rotate_by(x_BHLP, rotation(position_L.to(wide), x_BHLP.shape[-1]))
