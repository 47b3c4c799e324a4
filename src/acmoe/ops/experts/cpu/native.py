"""The experts in C for few rows of small experts.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu),
E experts.
"""

from torch import Tensor

from acmoe.ops.experts.cpu.native_gradient import expert_mlp_in_c_with_gradient
from acmoe.ops.experts.cpu.native_products import (
    NotServedError,
    hidden_units,
    rows_times_weights,
    sum_of_choices,
)
from acmoe.ops.experts.reference import ExpertWeights, expert_mlp
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.native.library import unsupported as not_native
from acmoe.ops.native.library import unsupported_ids, unsupported_size
from acmoe.ops.sort.reference import Rows

# Up to these sizes one thread takes less time than BLAS in two, and torch's calls around it.
MOST = 2**22  # products N * W * D
MOST_WEIGHTS = 2**19  # W * D of all experts that have rows; with gradients, of all experts


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
    if dropout > 0:
        return "it has no dropout"
    if not _fit(x, weights, rows, gate, activation):
        return "tokens, weights, rows and gates do not fit each other"
    return _large(x, weights, gate) or not_native(*weights) or unsupported_ids(*rows[:3])


def _large(x: Tensor, weights: ExpertWeights, gate: Tensor) -> str | None:
    """Return the reason why a call of this size is left to torch, or None."""
    (E, W, D), N = weights.up.shape, gate.numel()
    read = (E if records_gradient(x, gate, *weights) else min(E, N)) * W * D
    if read > MOST_WEIGHTS:
        return unsupported_size(read, MOST_WEIGHTS, "weights")
    return unsupported_size(N * W * D, MOST, "products")


def _fit(x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, activation: str) -> bool:
    """Return True if all shapes fit each other: the C functions do not check them."""
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
    relu = activation == "relu"
    try:
        if records_gradient(x, gate, *weights):
            return expert_mlp_in_c_with_gradient(x, weights, rows, gate, activation)
        h_NW = rows_times_weights(
            *(x, weights.up, weights.up_bias, rows), relu=relu, top_k=gate.shape[1]
        )
        h_NF = hidden_units(h_NW, activation)
        y_ND = rows_times_weights(h_NF, weights.down, weights.down_bias, rows, relu=False)
        return sum_of_choices(y_ND, rows.inverse, gate)
    except NotServedError:
        return expert_mlp.definition(x, weights, rows, gate, activation=activation)
