"""What attention to a window keeps for its backward: every weight, in the dtype of its products.

With them the backward reads 2 bytes an entry where it would take two products, an exponential and a
coin again. Without, it computes them again, stream by stream: where they do not fit.

A weight lies where attention_skew.py puts its query and key, in rows `APART`. It is relative to the
peak its row had seen when its tile came: exp2(steep * score - base), with the sign bit set where
dropout has dropped it. The softmax's own weight is |weight| * exp2(base - lse). Tiles of queries
and keys that meet the window are written whole, with zeros outside it; what none meets is not.

B streams, H heads, L queries, N keys, W distances in reach, P features of a head.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from acmoe.ops.attention.triton.backward import delta_of, table_gradient
from acmoe.ops.attention.triton.output import empty_output
from acmoe.ops.attention.triton.queries import queries_gradient
from acmoe.ops.attention.triton.skew import (
    APART,
    Band,
    add_shifted,
    comb,
    rows_of,
    shifted_tables,
)
from acmoe.ops.device.dropout_rng import pair_threshold

TILE = 64  # keys that share a base


class Kept(NamedTuple):
    """Both without a number where nothing is kept."""

    weights: Tensor  # flat, of `Band.size`
    base: Tensor  # (B, H, tiles of keys, L) float32, in powers of two


def kept_band(shape: torch.Size, num_keys: int, span: int) -> Band:
    """Where weights of queries of a shape (B, H, L, P) lie."""
    return Band(shape[1], shape[2], num_keys, span, APART)


def kept_sizes(shape: torch.Size, num_keys: int, span: int) -> tuple[int, tuple[int, ...]]:
    """Of weights and bases."""
    batch, heads, num_queries, _ = shape
    weights = kept_band(shape, num_keys, span).size(batch * heads)
    return weights, (batch, heads, triton.cdiv(num_keys, TILE), num_queries)


def run_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Kept,
    dkv: Tensor,
    scale: float,
    dropout: float,
    features: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of `features` of the queries and of the table; dkv is filled.

    The first like grad and out, which are as wide as kv: as `empty_output` has them.

    What was kept stays as it is, for another backward of the same forward: the gradient of the
    scores has a buffer of its own.
    """
    from acmoe.ops.attention.hopper.keys import run_keys

    k, v = kv.unbind()
    band = kept_band(q.shape, k.shape[2], table.shape[1])
    share = 1 - pair_threshold(dropout) / 2**32  # of probabilities kept
    dscores = torch.empty_like(kept.weights)
    delta = delta_of(out, grad, share)
    scales = (scale / share, 1 / share)
    run_keys(q, v, grad, kept, lse, delta, dscores, *dkv.unbind(), band, *scales, features)
    dq = empty_output(q, features)
    table_8PC = shifted_tables(table, band, q.dtype)
    rows = rows_of(dscores, band)
    queries_gradient(k, table_8PC, rows, dq, band, scale / share, features)
    dtable = torch.zeros(table.shape, device=q.device)
    add_shifted(dtable, table_gradient(comb(q), rows), band, scale / share)
    return dq, dtable.to(table.dtype)
