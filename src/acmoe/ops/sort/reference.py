"""Routed rows sorted by expert, in plain PyTorch.

T tokens, K experts per token, N = T * K routed rows, E experts, C = E clusters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.dispatch import op, transforming
from acmoe.ops.sort.order import no_order


class Rows(NamedTuple):
    """Routed rows sorted by expert. The row of token t and its k-th choice is t * K + k."""

    permutation: Tensor  # (N,) the row at each sorted position
    inverse: Tensor  # (N,) the sorted position of each row
    offsets: Tensor  # (E,) where each expert's rows end; rows without an expert come last
    expert: Tensor  # (N,) sorted expert ids
    order: Tensor  # tokens sorted by cluster (`RoutingState.order`); empty: not sorted


@op
def sort_rows(
    expert_ids: Tensor,
    num_experts: int,
    *,
    cluster: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Rows:
    """Sort the rows of expert_ids (T, K) by expert, stably and without waiting for the device.

    Args:
        expert_ids: (T, K) int64; the id E means "no expert".
        num_experts: E.
        cluster: (T,) cluster of each token. A kernel may also sort the tokens by cluster, in the
            same launches; this definition does not.
        token_mask: (T,) False for tokens that belong to no cluster.
    """
    expert_N, permutation_N = expert_ids.reshape(-1).sort(stable=True)
    rows_N = torch.arange(permutation_N.numel(), device=permutation_N.device)
    ids_E = torch.arange(num_experts, device=permutation_N.device)
    if transforming():  # vmap would run the other form in a loop over its batch
        inverse_N = permutation_N.argsort()
        offsets_E = (expert_N[:, None] <= ids_E).sum(0)
    else:
        inverse_N = torch.empty_like(permutation_N).scatter_(0, permutation_N, rows_N)
        offsets_E = torch.searchsorted(expert_N, ids_E, right=True)
    return Rows(permutation_N, inverse_N, offsets_E, expert_N, no_order(expert_ids))
