"""Attention inside the windows of a feature map, in plain PyTorch.

A shift rolls the map before it is cut into windows (Swin). A window along the edge then holds
tokens from two opposite ends of the map, which must not attend to each other. The result is rolled
back, so that every token is at its own position.

Shapes: B images, Y rows and X columns of the map, D = H * P features, W windows in the map,
N tokens of a window, H heads, P features of a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.errors import check
from acmoe.ops.dispatch import op


class Tiling(NamedTuple):
    """The (rows, columns) of a window, and of the shift by which the map is rolled first."""

    window: tuple[int, int]
    shift: tuple[int, int]


def tiling(rows: int, columns: int, window: int, *, shifted: bool) -> Tiling:
    """Return the tiling of a map; a side no longer than the window is one window, without shift."""
    sides = [min(window, side) for side in (rows, columns)]
    shifts = [window // 2 if shifted and side > window else 0 for side in (rows, columns)]
    return Tiling((sides[0], sides[1]), (shifts[0], shifts[1]))


def split_windows(x_BYXD: Tensor, tiles: Tiling) -> Tensor:
    """Roll the map, then cut it into windows (B, W, N, D)."""
    B, Y, X, D = x_BYXD.shape
    rows, columns = tiles.window
    down, right = tiles.shift
    if down or right:
        x_BYXD = x_BYXD.roll((-down, -right), dims=(1, 2))
    cut = x_BYXD.view(B, Y // rows, rows, X // columns, columns, D)
    return cut.transpose(2, 3).reshape(B, -1, rows * columns, D)


def join_windows(x_BWND: Tensor, tiles: Tiling, size: tuple[int, int]) -> Tensor:
    """Invert `split_windows`: return the map (B, Y, X, D)."""
    B, _, _, D = x_BWND.shape
    rows, columns = tiles.window
    Y, X = size
    cut = x_BWND.view(B, Y // rows, X // columns, rows, columns, D)
    x_BYXD = cut.transpose(2, 3).reshape(B, Y, X, D)
    return x_BYXD.roll(tiles.shift, dims=(1, 2)) if any(tiles.shift) else x_BYXD


def shift_mask(tiles: Tiling, size: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return (W, N, N), True where a query may see a key; None without a shift: it may see all."""
    if not any(tiles.shift):
        return None
    # Number the regions of the unrolled map between window borders. Two tokens of a window may see
    # each other only if they come from the same region.
    region_Y, region_X = (
        torch.div(torch.arange(side, device=device) - shift, window, rounding_mode="floor") + 1
        for side, shift, window in zip(size, tiles.shift, tiles.window, strict=True)
    )
    region_YX = region_Y[:, None] * (size[1] + 1) + region_X
    region_WN = split_windows(region_YX[None, :, :, None], tiles)[0, :, :, 0]
    return region_WN[:, :, None] == region_WN[:, None, :]


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split (..., N, 3 * H * P) into queries, keys and values (..., H, N, P)."""
    parts = qkv.view(*qkv.shape[:-1], 3, heads, -1).movedim(-3, 0).transpose(-3, -2)
    return parts[0], parts[1], parts[2]


def attend_windows(
    q: Tensor, k: Tensor, v: Tensor, bias_HNN: Tensor, tiles: Tiling, size: tuple[int, int]
) -> Tensor:
    """Return (B, W, N, D): softmax(q . k / sqrt(P) + bias) v inside each window.

    q, k and v are (B, W, H, N, P); `size` holds the rows and columns of the map.
    """
    B, W, H, N, P = q.shape
    bias_WHNN = bias_HNN.to(q.dtype).expand(W, H, N, N)
    seen_WNN = shift_mask(tiles, size, q.device)
    if seen_WNN is not None:
        bias_WHNN = bias_WHNN.masked_fill(~seen_WNN[:, None], -math.inf)
    # Merge windows and heads into one dimension: fused attention kernels take four dimensions.
    out = F.scaled_dot_product_attention(
        q.reshape(B, W * H, N, P),
        k.reshape(B, W * H, N, P),
        v.reshape(B, W * H, N, P),
        attn_mask=bias_WHNN.reshape(1, W * H, N, N),
    )
    return out.view(B, W, H, N, P).transpose(2, 3).flatten(3)


@op
def map_attention(
    qkv: Tensor, bias: Tensor, *, window: tuple[int, int], shift: tuple[int, int]
) -> Tensor:
    """Return (B, Y, X, D): softmax(q . k / sqrt(P) + bias) v of every token over its window.

    Args:
        qkv: (B, Y, X, 3D) query, key and value of each token, H heads of P features each.
        bias: (H, N, N) by query and key of a window.
        window: rows and columns of a window; they divide Y and X.
        shift: rows and columns by which the map is rolled up and to the left before it is cut.
            Tokens that share a window only because of the roll do not see each other.
    """
    check_windows(qkv, window)
    tiles, size = Tiling(window, shift), (qkv.shape[1], qkv.shape[2])
    q, k, v = split_heads(split_windows(qkv, tiles), bias.shape[0])
    return join_windows(attend_windows(q, k, v, bias, tiles, size), tiles, size)


def check_windows(qkv: Tensor, window: tuple[int, int]) -> None:
    """Raise a UserError unless the sides of a window divide those of the map."""
    Y, X = qkv.shape[1:3]
    check(
        Y % window[0] == 0 and X % window[1] == 0,
        f"a map of {Y} x {X} tokens cannot be cut into windows of {window[0]} x {window[1]}; pass "
        "a window whose sides divide it",
    )
