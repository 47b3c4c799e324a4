"""The experts of a single token on a CPU: products of matrices and vectors, in few calls.

Decoding one sequence reads the weights of K experts and computes little. After each product, which
reads megabytes, hardly any code of Python or torch is left in the caches, so that every further
call is slow. This kernel makes few calls: it neither copies the token for each expert nor gathers
rows, and the second product adds its result, times the gate, to the sum of the earlier experts.
docs/performance/cpu.md has its times.

K experts of the token, D features, F hidden units, W = F (or 2F for swiglu).
"""

import torch
from torch import Tensor

from acmoe.ops.experts.reference import ExpertWeights, activated, expert_mlp
from acmoe.ops.sort.reference import Rows


def expert_mlp_of_one_token(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
) -> Tensor:
    """Compute `expert_mlp` of one token, (1, D), without dropout."""
    (gates,) = gate.tolist()
    if 0.0 in gates:  # BLAS skips a product times 0, and 0 * inf is NaN
        return expert_mlp.definition(x, weights, rows, gate, activation=activation)
    ids_K = rows.expert.index_select(0, rows.inverse)
    ids = ids_K.tolist()
    # These views are made before the first product, while Python's code is in the caches.
    ups, downs = [weights.up[one] for one in ids], [weights.down[one] for one in ids]
    x_D, h_KW = x[0], x.new_empty(len(ids), weights.up.shape[1])
    for h_W, up_WD in list(zip(h_KW.unbind(), ups, strict=True)):
        h_W.addmv_(up_WD, x_D, beta=0)
    if weights.up_bias is not None:
        h_KW += weights.up_bias.index_select(0, ids_K)
    h_KF = activated(h_KW, activation)
    if weights.down_bias is None:
        y_1D, kept = torch.empty_like(x), 0
    else:
        y_1D, kept = gate @ weights.down_bias.index_select(0, ids_K), 1
    y_D = y_1D[0]
    for h_F, down_DF, factor in list(zip(h_KF.unbind(), downs, gates, strict=True)):
        y_D.addmv_(down_DF, h_F, beta=kept, alpha=factor)
        kept = 1
    return y_1D
