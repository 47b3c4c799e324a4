"""The experts in C for few rows of small experts, without gradients.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu),
E experts.
"""

import torch
from torch import Tensor

from acmoe.ops.experts.reference import ExpertWeights, activated
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.native.library import functions, pointer, unsupported_size
from acmoe.ops.native.library import unsupported as not_native
from acmoe.ops.sort.reference import Rows

MOST = 2**19  # products N * W * D up to which BLAS and torch's calls take longer


def unsupported(
    x: Tensor, weights: ExpertWeights, gate: Tensor, dropout: float, complete: bool
) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    reason = not_native(x, gate)
    if reason is not None:
        return reason
    if not complete:
        return "it serves tokens whose rows all have an expert"
    if dropout > 0 or records_gradient(x, gate, *weights):
        return "it has no gradient and no dropout"
    _, width, dim = weights.up.shape
    size = unsupported_size(gate.numel() * width * dim, MOST, "products")
    return size or not_native(*weights)


def expert_mlp_in_c(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    """Compute `expert_mlp`, (T, D). `unsupported` has refused dropout and incomplete rows."""
    (T, K), (E, W, D) = gate.shape, weights.up.shape
    permutation, offsets = rows.permutation.data_ptr(), rows.offsets.data_ptr()
    h_NW, relu = x.new_empty(T * K, W), activation == "relu"
    functions().rows_times_weights(
        *(x.data_ptr(), permutation, K, offsets, weights.up.data_ptr()),
        *(pointer(weights.up_bias), E, D, W, relu, h_NW.data_ptr()),
    )
    h_NF = h_NW if relu else activated(h_NW, activation)
    y_ND, y_TD = x.new_empty(T * K, D), torch.empty_like(x)
    functions().rows_times_weights(
        *(h_NF.data_ptr(), None, K, offsets, weights.down.data_ptr()),
        *(pointer(weights.down_bias), E, h_NF.shape[1], D, False, y_ND.data_ptr()),
    )
    functions().combine(
        *(y_ND.data_ptr(), rows.inverse.data_ptr(), gate.data_ptr(), T, K, D, y_TD.data_ptr())
    )
    return y_TD
