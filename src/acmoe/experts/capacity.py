"""Limit the number of rows an expert takes.

T tokens, K experts per token, E experts.
"""

import math

import torch
from torch import Tensor

from acmoe.ops.precision import wide_dtype
from acmoe.routing.router import real_tokens, rows_for
from acmoe.routing.state import Routing


def limit_capacity(
    routing: Routing,
    num_experts: int,
    top_k: int,
    factor: float,
    token_mask_T: Tensor | None = None,
) -> Routing:
    """Drop the rows of an expert beyond k * floor(factor * ceil(T / E)), as Tutel does.

    All first choices come before all second choices, and so on; within a choice, tokens with a
    larger maximal gate come first. Column j of `expert_ids` is choice j; with expert choice it is
    expert j, so there the tokens' gates alone decide. A dropped row gets expert id E and gate 0;
    `affinity` is not changed. A token with NaN or inf has NaN gates: it takes no other token's
    place and keeps its gates, so that its output is NaN as it is without a limit.
    """
    priority_T = routing.gate.detach().amax(-1)
    bad_T1 = priority_T.isnan()[:, None]
    expert_ids_TK = routing.expert_ids.masked_fill(bad_T1, num_experts)
    if token_mask_T is not None:
        expert_ids_TK = expert_ids_TK.masked_fill(~token_mask_T[:, None], num_experts)
    # float64, as in Python: in float32 1.05 * 120 is less than 126.
    if wide_dtype(routing.gate.device) == torch.float64:
        tokens = real_tokens(routing.gate, token_mask_T)
        per_choice = (factor * (tokens / num_experts).ceil()).floor()
    else:
        per_choice = rows_for(
            lambda n: factor * math.ceil(n / num_experts), routing.gate, token_mask_T
        )
    capacity = top_k * per_choice  # top_k, not K: a threshold router has K = E columns

    kept_TK = (_ranks(expert_ids_TK, priority_T) < capacity) & (expert_ids_TK < num_experts)
    return routing._replace(
        expert_ids=torch.where(kept_TK, expert_ids_TK, num_experts),
        gate=routing.gate.masked_fill(~(kept_TK | bad_T1), 0.0),
    )


def _ranks(expert_ids_TK: Tensor, priority_T: Tensor) -> Tensor:
    """Return each row's rank among the rows of its expert, by (choice, priority), (T, K)."""
    T, K = expert_ids_TK.shape
    # Sort all rows by (choice, priority), then stably by expert: the position of a row among those
    # of its expert is its rank.
    by_priority_T = priority_T.argsort(descending=True, stable=True)
    queue_N = expert_ids_TK[by_priority_T].T.reshape(-1)
    sorted_N, order_N = queue_N.sort(stable=True)
    first_N = torch.searchsorted(sorted_N, sorted_N)
    rank_sorted_N = torch.arange(T * K, device=queue_N.device) - first_N
    rank_N = torch.empty_like(rank_sorted_N).scatter(0, order_N, rank_sorted_N)
    rank_TK = torch.empty_like(expert_ids_TK)
    rank_TK[by_priority_T] = rank_N.view(K, T).T
    return rank_TK
