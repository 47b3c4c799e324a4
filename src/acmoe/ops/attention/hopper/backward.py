"""Backward pass of sliding-window attention on Hopper, from the weights that the forward saved.

Three kernels and one GEMM compute the gradients:

    delta_kernel     triton/backward.py: delta = keep_prob * rowsum(out * grad_out)
    keys_kernel      keys.py: dk, dv and dscore, from the saved weights (saved_weights.py)
    queries_kernel   triton/queries.py: dq from dscore
    torch.bmm        gradient of the relative-position embedding
"""

import torch
from torch import Tensor

from acmoe.ops.attention.hopper.keys import KeyGradients, Upstream, run_keys
from acmoe.ops.attention.hopper.saved_weights import SavedWeights, saved_layout
from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.triton.backward import compute_delta, rel_emb_gradient
from acmoe.ops.attention.triton.output import empty_output
from acmoe.ops.attention.triton.queries import queries_gradient
from acmoe.ops.attention.triton.skew import (
    add_shifted_gradient,
    query_planes,
    shift_rel_emb,
    skewed_view,
)
from acmoe.ops.device.dropout_rng import drop_threshold_paired


def run_backward(
    grad_out: Tensor,
    given: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: SavedWeights,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return dq and the gradient of rel_emb, and fill dk and dv.

    dq has the first `features` of a head. grad_out and out have as many features as k. All three
    are laid out by `empty_output`.

    `saved` is not modified, so that backward can run again for the same forward: the gradient of
    the scores has a buffer of its own.
    """
    q, k, v, rel_emb, _, _, scale, dropout, features = given
    skew = saved_layout(q.shape, k.shape[2], rel_emb.shape[1])
    keep_prob = 1 - drop_threshold_paired(dropout) / 2**32
    dscores = torch.empty_like(saved.weights)
    delta = compute_delta(out, grad_out, keep_prob)
    found = KeyGradients(dscores, dk, dv, dk_scale=scale / keep_prob, dv_scale=1 / keep_prob)
    run_keys(q, v, Upstream(grad_out, lse, delta), saved, found, skew, features)
    dq = empty_output(q, features)
    rel_emb_8PC = shift_rel_emb(rel_emb, skew, q.dtype)
    dscore_8RC = skewed_view(dscores, skew)
    queries_gradient(k, rel_emb_8PC, dscore_8RC, dq, skew, scale / keep_prob, features)
    drel_emb = torch.zeros(rel_emb.shape, device=q.device)
    add_shifted_gradient(
        drel_emb, rel_emb_gradient(query_planes(q), dscore_8RC), skew, scale / keep_prob
    )
    return dq, drel_emb.to(rel_emb.dtype)
