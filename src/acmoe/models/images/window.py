"""Attention inside the windows of a map, shifted by half a window in every second block.

A shift rolls the map, so that the windows along its edge hold tokens from both ends, which must not
see each other. Everything is rolled back afterwards: outside this file a token keeps its place.

Shapes: B batch, Y rows and X columns of the map, D features, W windows in it, N tokens of a window,
H heads, P features of a head, A = 3D numbers of query, key and value.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from acmoe.models.images.position_bias import POSITIONS
from acmoe.ops.map_attention.op import map_attention, map_attention_fuses
from acmoe.ops.precision import autocast_dtype


class Tiling(NamedTuple):
    """How a map is cut: (rows, columns) of a window, and by how much the map is rolled before."""

    window: tuple[int, int]
    shift: tuple[int, int]


def tiling(rows: int, columns: int, window: int, *, shifted: bool) -> Tiling:
    """A side no longer than the window is one window, and has nothing to shift."""
    sides = [min(window, side) for side in (rows, columns)]
    shifts = [window // 2 if shifted and side > window else 0 for side in (rows, columns)]
    return Tiling((sides[0], sides[1]), (shifts[0], shifts[1]))


def split_windows(x_BYXD: Tensor, tiles: Tiling) -> Tensor:
    """(B, W, N, D): roll, then cut."""
    B, Y, X, D = x_BYXD.shape
    rows, columns = tiles.window
    down, right = tiles.shift
    if down or right:
        x_BYXD = x_BYXD.roll((-down, -right), dims=(1, 2))
    cut = x_BYXD.view(B, Y // rows, rows, X // columns, columns, D)
    return cut.transpose(2, 3).reshape(B, -1, rows * columns, D)


def join_windows(x_BWND: Tensor, tiles: Tiling, size: tuple[int, int]) -> Tensor:
    """(B, Y, X, D): what `split_windows` cut, in its old place."""
    B, _, _, D = x_BWND.shape
    rows, columns = tiles.window
    Y, X = size
    cut = x_BWND.view(B, Y // rows, X // columns, rows, columns, D)
    x_BYXD = cut.transpose(2, 3).reshape(B, Y, X, D)
    return x_BYXD.roll(tiles.shift, dims=(1, 2)) if any(tiles.shift) else x_BYXD


def shift_mask(tiles: Tiling, size: tuple[int, int], device: torch.device) -> Tensor | None:
    """(W, N, N) True where a query may see a key; None where all of a window may."""
    if not any(tiles.shift):
        return None
    # Number the pieces between cuts: the first piece, cut off by the shift, has number -1.
    piece_Y, piece_X = (
        torch.div(torch.arange(side, device=device) - shift, window, rounding_mode="floor") + 1
        for side, shift, window in zip(size, tiles.shift, tiles.window, strict=True)
    )
    piece_YX = piece_Y[:, None] * (size[1] + 1) + piece_X
    piece_WN = split_windows(piece_YX[None, :, :, None], tiles)[0, :, :, 0]
    return piece_WN[:, :, None] == piece_WN[:, None, :]


class WindowAttention(nn.Module):
    """Multi-head attention inside windows, with a position bias on the scores."""

    def __init__(self, *, dim: int, heads: int, window: int, shifted: bool, position: str) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.shifted = shifted
        self.qkv = nn.Linear(dim, 3 * dim)
        self.position = POSITIONS[position](window=window, heads=heads)
        self.output = nn.Linear(dim, dim)

    def forward(self, x_BYXD: Tensor) -> Tensor:
        tiles = tiling(x_BYXD.shape[1], x_BYXD.shape[2], self.window, shifted=self.shifted)
        if _fuses(x_BYXD, tiles, self.heads):
            qkv_BYXA, bias_HNN = self.qkv(x_BYXD), self.position(*tiles.window)
            seen = map_attention(qkv_BYXA, bias_HNN, window=tiles.window, shift=tiles.shift)
            return cast(Tensor, self.output(seen))
        return self._by_windows(x_BYXD, tiles)

    def _by_windows(self, x_BYXD: Tensor, tiles: Tiling) -> Tensor:
        size = (x_BYXD.shape[1], x_BYXD.shape[2])
        q, k, v = split_heads(self.qkv(split_windows(x_BYXD, tiles)), self.heads)
        B, W, H, N, P = q.shape
        bias_WHNN = self.position(*tiles.window).to(q.dtype).expand(W, H, N, N)
        seen_WNN = shift_mask(tiles, size, x_BYXD.device)
        if seen_WNN is not None:
            bias_WHNN = bias_WHNN.masked_fill(~seen_WNN[:, None], -math.inf)
        # Windows stand beside heads: fused attention kernels take four dimensions.
        out = nn.functional.scaled_dot_product_attention(
            q.reshape(B, W * H, N, P),
            k.reshape(B, W * H, N, P),
            v.reshape(B, W * H, N, P),
            attn_mask=bias_WHNN.reshape(1, W * H, N, N),
        )
        out_BWND = out.view(B, W, H, N, P).transpose(2, 3).flatten(3)
        return join_windows(cast(Tensor, self.output(out_BWND)), tiles, size)


def _fuses(x_BYXD: Tensor, tiles: Tiling, heads: int) -> bool:
    """Whether windows can be attended to where they lie in the map."""
    dtype = autocast_dtype(x_BYXD) or x_BYXD.dtype
    rows, columns = tiles.window
    features = x_BYXD.shape[-1] // heads
    return map_attention_fuses(x_BYXD.device, dtype, tokens=rows * columns, features=features)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (..., H, N, P), from (..., N, 3 * H * P)."""
    parts = qkv.view(*qkv.shape[:-1], 3, heads, -1).movedim(-3, 0).transpose(-3, -2)
    return parts[0], parts[1], parts[2]
