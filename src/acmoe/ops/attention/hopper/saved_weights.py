"""Attention weights that the Hopper forward saves for the backward pass (backward.py).

The forward saves the weight of every query and key in the 16-bit dtype of the GEMMs. Backward then
reads 2 bytes per element, instead of recomputing it with two GEMMs, an exponential and the dropout
mask. Where the weights do not fit in memory, triton/backward.py recomputes them slice by slice of
the batch.

Format. The weights are in the skewed layout of triton/skew.py, with gaps of ROW_GAP between rows. A
weight is exp2(scale_log2 * score - row_max), where row_max is the running row maximum, times
scale_log2 = scale * log2(e), when the forward visited the tile. Its sign bit is set where dropout
dropped it. The softmax probability is |weight| * exp2(row_max - lse). Tiles of queries and keys
that meet the window are stored whole, with zeros outside the window; the rest of the buffer is not
initialised.

Shapes: B batch, H heads, L queries, P head dimension.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from acmoe.ops.attention.triton.skew import ROW_GAP, SkewLayout

TILE = 64  # keys per tile, which share a running maximum


class SavedWeights(NamedTuple):
    """Buffers of the weights saved for backward; both are empty where nothing is saved."""

    weights: Tensor  # flat, `SkewLayout.numel` elements
    row_max: Tensor  # (B, H, tiles of keys, L) float32, the row maxima times scale_log2


def saved_layout(shape: torch.Size, num_keys: int, span: int) -> SkewLayout:
    """Return the layout of the saved weights for queries of shape (B, H, L, P)."""
    return SkewLayout(shape[1], shape[2], num_keys, span, ROW_GAP)


def saved_sizes(shape: torch.Size, num_keys: int, span: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of elements of `SavedWeights.weights` and the shape of
    `SavedWeights.row_max`."""
    batch, heads, num_queries, _ = shape
    weights = saved_layout(shape, num_keys, span).numel(batch * heads)
    return weights, (batch, heads, triton.cdiv(num_keys, TILE), num_queries)
