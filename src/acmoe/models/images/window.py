"""Attention inside the windows of a map, shifted by half a window in every second block.

Shapes: B batch, Y rows and X columns of the map, D features.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from acmoe.models.images.position_bias import POSITIONS
from acmoe.ops.map_attention.reference import (
    Tiling,
    attend_windows,
    join_windows,
    split_heads,
    split_windows,
    tiling,
)


class WindowAttention(nn.Module):
    """Multi-head attention inside windows, with a position bias on the scores.

    `attend` computes the forward pass; `acmoe.fast` may put another function in its place.
    """

    def __init__(self, *, dim: int, heads: int, window: int, shifted: bool, position: str) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.shifted = shifted
        self.qkv = nn.Linear(dim, 3 * dim)
        self.position = POSITIONS[position](window=window, heads=heads)
        self.output = nn.Linear(dim, dim)
        self.attend: Callable[[WindowAttention, Tensor, Tiling], Tensor] = attend_by_windows

    def forward(self, x_BYXD: Tensor) -> Tensor:
        tiles = tiling(x_BYXD.shape[1], x_BYXD.shape[2], self.window, shifted=self.shifted)
        return self.attend(self, x_BYXD, tiles)


def attend_by_windows(attention: WindowAttention, x_BYXD: Tensor, tiles: Tiling) -> Tensor:
    """Cut the map into windows, attend inside each, and join them again."""
    size = (x_BYXD.shape[1], x_BYXD.shape[2])
    q, k, v = split_heads(attention.qkv(split_windows(x_BYXD, tiles)), attention.heads)
    bias_HNN = attention.position(*tiles.window)
    out_BWND = attend_windows(q, k, v, bias_HNN, tiles, size)
    return join_windows(cast(Tensor, attention.output(out_BWND)), tiles, size)
