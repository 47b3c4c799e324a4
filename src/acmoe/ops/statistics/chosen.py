"""The clusters that exist for the published code: those up to the last one that a token chose.

T tokens, C clusters, K experts and J clusters of each token.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import eager, op
from acmoe.ops.statistics.scale import up_to_last


@op
def clusters_up_to_last(
    expert_ids_TK: Tensor,
    assignment_TJ: Tensor,
    num_clusters: int,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Return (C,) True for the clusters up to the last one among the tokens' ids.

    Ids outside 0 to C - 1 mean "none", and those of masked tokens do not count. token_mask: (T,).
    """
    ids_TX = torch.cat([expert_ids_TK, assignment_TJ], dim=1)
    none_TX = (ids_TX < 0) | (ids_TX >= num_clusters)
    if token_mask is not None:
        none_TX = none_TX | ~token_mask.reshape(-1, 1)
    # The last entry takes the ids of "none".
    chosen = torch.zeros(num_clusters + 1, dtype=torch.bool, device=ids_TX.device)
    ids_TX = ids_TX.masked_fill(none_TX, num_clusters)
    return up_to_last(chosen.index_fill(0, ids_TX.flatten(), True)[:num_clusters])


def _unsupported(expert_ids_TK: Tensor, assignment_TJ: Tensor) -> str | None:
    if expert_ids_TK.dtype != torch.int64 or assignment_TJ.dtype != torch.int64:
        return "its kernel takes int64 ids"
    if expert_ids_TK.numel() == 0:
        return "there are no tokens"
    return triton_unsupported(expert_ids_TK, any_dtype=True)


@clusters_up_to_last.register("triton", unsupported=_unsupported, by_triton=True)
def _by_triton(
    expert_ids_TK: Tensor,
    assignment_TJ: Tensor,
    num_clusters: int,
    token_mask: Tensor | None = None,
) -> Tensor:
    given = expert_ids_TK, assignment_TJ, num_clusters, token_mask
    run = _launched if eager(expert_ids_TK, assignment_TJ, token_mask) else up_to_last_op
    return run(*given)


def _launched(
    expert_ids_TK: Tensor, assignment_TJ: Tensor, num_clusters: int, token_mask: Tensor | None
) -> Tensor:
    from acmoe.ops.statistics.triton.chosen import launch_up_to_last

    return launch_up_to_last(expert_ids_TK, assignment_TJ, num_clusters, token_mask)


up_to_last_op = torch.library.custom_op("acmoe::up_to_last", _launched, mutates_args=())


@up_to_last_op.register_fake
def _(
    expert_ids_TK: Tensor, assignment_TJ: Tensor, num_clusters: int, token_mask: Tensor | None
) -> Tensor:
    return expert_ids_TK.new_empty(num_clusters, dtype=torch.bool)
