"""The experts in C for few rows of small experts, without gradients.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu),
E experts.
"""

import torch
from torch import Tensor

from acmoe.ops.experts.reference import ExpertWeights, activated, expert_mlp
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.native.library import (
    SERVED,
    functions,
    pointer,
    unsupported_ids,
    unsupported_size,
)
from acmoe.ops.native.library import unsupported as not_native
from acmoe.ops.sort.reference import Rows

MOST = 2**19  # products N * W * D up to which BLAS and torch's calls take longer


def unsupported(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    activation: str,
    dropout: float,
    complete: bool,
) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    reason = not_native(x, gate)
    if reason is not None:
        return reason
    if not complete:
        return "it serves tokens whose rows all have an expert"
    if dropout > 0 or records_gradient(x, gate, *weights):
        return "it has no gradient and no dropout"
    if not _fit(x, weights, rows, gate, activation):
        return "tokens, weights, rows and gates do not fit each other"
    _, width, dim = weights.up.shape
    size = unsupported_size(gate.numel() * width * dim, MOST, "products")
    return size or not_native(*weights) or unsupported_ids(*rows[:3])


def _fit(x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, activation: str) -> bool:
    """Return True if all shapes are of one layer: C trusts these sizes."""
    up, down, up_bias, down_bias = weights
    if x.dim() != 2 or gate.dim() != 2 or up.dim() != 3:
        return False
    (T, D), (E, W, dim), N = x.shape, up.shape, gate.numel()
    F = W // 2 if activation == "swiglu" else W
    return (
        (gate.shape[0], dim, rows.offsets.shape) == (T, D, (E,))
        and (down.shape, W) == ((E, D, F), 2 * F if activation == "swiglu" else F)
        and (up_bias is None or up_bias.shape == (E, W))
        and (down_bias is None or down_bias.shape == (E, D))
        and (rows.permutation.shape, rows.inverse.shape) == ((N,), (N,))
    )


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
    (T, K), (E, W, D), relu = gate.shape, weights.up.shape, activation == "relu"
    offsets, h_NW = rows.offsets.data_ptr(), x.new_empty(T * K, W)
    code = functions().rows_times_weights(
        *(x.data_ptr(), rows.permutation.data_ptr(), K, offsets, weights.up.data_ptr()),
        *(pointer(weights.up_bias), T * K, E, D, W, relu, h_NW.data_ptr()),
    )
    if code == SERVED:
        h_NF = h_NW if relu else activated(h_NW, activation)
        y_ND, y_TD = x.new_empty(T * K, D), torch.empty_like(x)
        functions().rows_times_weights(
            *(h_NF.data_ptr(), None, K, offsets, weights.down.data_ptr()),
            *(pointer(weights.down_bias), T * K, E, h_NF.shape[1], D, False, y_ND.data_ptr()),
        )
        code = functions().combine(
            *(y_ND.data_ptr(), rows.inverse.data_ptr(), gate.data_ptr(), T, K, D, y_TD.data_ptr())
        )
        if code == SERVED:
            return y_TD
    return expert_mlp.definition(x, weights, rows, gate, activation=activation)
