"""Attention weights saved by the Hopper forward for backward, and the backward pass that uses them.

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

Backward runs delta_kernel (triton/backward.py), keys_kernel (keys.py: dk, dv and dscore),
queries_kernel (triton/queries.py: dq), and a torch.bmm for the relative-position embedding.

Shapes: B batch, H heads, L queries, N keys, W window, P head dimension.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from acmoe.ops.attention.triton.backward import compute_delta, rel_emb_gradient
from acmoe.ops.attention.triton.output import empty_output
from acmoe.ops.attention.triton.queries import queries_gradient
from acmoe.ops.attention.triton.skew import (
    ROW_GAP,
    SkewLayout,
    add_shifted_gradient,
    query_planes,
    shift_rel_emb,
    skewed_view,
)
from acmoe.ops.device.dropout_rng import drop_threshold_paired

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


def run_backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    rel_emb: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: SavedWeights,
    dkv: Tensor,
    scale: float,
    dropout: float,
    features: int,
) -> tuple[Tensor, Tensor]:
    """Return dq and the gradient of rel_emb, and fill dkv.

    dq has the first `features` of a head. grad_out and out have as many features as kv. All three
    are laid out by `empty_output`.

    `saved` is not modified, so that backward can run again for the same forward: the gradient of
    the scores has a buffer of its own.
    """
    from acmoe.ops.attention.hopper.keys import run_keys

    k, v = kv.unbind()
    skew = saved_layout(q.shape, k.shape[2], rel_emb.shape[1])
    keep_prob = 1 - drop_threshold_paired(dropout) / 2**32
    dscores = torch.empty_like(saved.weights)
    delta = compute_delta(out, grad_out, keep_prob)
    scales = (scale / keep_prob, 1 / keep_prob)
    run_keys(q, v, grad_out, saved, lse, delta, dscores, *dkv.unbind(), skew, *scales, features)
    dq = empty_output(q, features)
    rel_emb_8PC = shift_rel_emb(rel_emb, skew, q.dtype)
    dscore_8RC = skewed_view(dscores, skew)
    queries_gradient(k, rel_emb_8PC, dscore_8RC, dq, skew, scale / keep_prob, features)
    drel_emb = torch.zeros(rel_emb.shape, device=q.device)
    add_shifted_gradient(
        drel_emb, rel_emb_gradient(query_planes(q), dscore_8RC), skew, scale / keep_prob
    )
    return dq, drel_emb.to(rel_emb.dtype)
