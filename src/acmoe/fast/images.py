"""Window attention of image classifiers by a kernel that reads the feature map directly.

Shapes: B batch, Y rows and X columns of the map, D features, H heads, N tokens of a window.
"""

from typing import cast

from torch import Tensor

from acmoe.models.images.window import WindowAttention, attend_by_windows
from acmoe.ops.dispatch import DEFINITION, log_once
from acmoe.ops.map_attention import map_attention
from acmoe.ops.map_attention.reference import Tiling
from acmoe.ops.precision import autocast_dtype


def attend_on_map(attention: WindowAttention, x_BYXD: Tensor, tiles: Tiling) -> Tensor:
    """Attend within windows without copying them out of the map, if a kernel supports it.

    A kernel that reads the map directly saves the passes over memory that roll the map, cut it into
    windows and join them again. Projections are called as modules, so hooks and adapters on them
    work.
    """
    reason = map_unsupported(attention, x_BYXD, tiles)
    if reason is not None:
        log_once(f"windows are cut out of their map: {reason}")
        return attend_by_windows(attention, x_BYXD, tiles)
    qkv_BYXA, bias_HNN = attention.qkv(x_BYXD), attention.position(*tiles.window)
    out = map_attention(qkv_BYXA, bias_HNN, window=tiles.window, shift=tiles.shift)
    return cast(Tensor, attention.output(out))


def map_unsupported(
    attention: WindowAttention, x: Tensor | None = None, tiles: Tiling | None = None
) -> str | None:
    """Return the reason why no kernel serves this layer for tokens like x, or None.

    Without x or tiles, ask for a map of one full window.
    """
    if x is None or tiles is None:
        side, weight = attention.window, attention.qkv.weight
        x, tiles = weight[:1].expand(1, side, side, -1), Tiling((side, side), (0, 0))
    number = x.new_empty(1, dtype=autocast_dtype(x) or x.dtype)
    tokens = tiles.window[0] * tiles.window[1]
    qkv = number.expand(*x.shape[:-1], 3 * attention.qkv.in_features)
    bias = number.expand(attention.heads, tokens, tokens)
    if map_attention.select(qkv, bias, **tiles._asdict()).name != DEFINITION:
        return None
    reasons = map_attention.reasons(qkv, bias, **tiles._asdict())
    return reasons.get("triton") or "plain PyTorch was asked for"
