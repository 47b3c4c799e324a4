"""Routed rows sorted by expert and tokens sorted by cluster, over the counting-sort kernels.

T tokens, K experts per token, N = T * K rows, E experts, C = E clusters, X places.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Below this many tokens for each cluster the gaps between sorted clusters cost more than they save.
FEWEST_TOKENS = 128


class Clusters(NamedTuple):
    """The tokens of a call sorted by cluster, as ops/sort/triton/sort.py leaves them."""

    assignment: Tensor  # (T, 1) int64 what was sorted: a state that holds another is not this one
    token: Tensor  # (X,) int32 token at each place, -1 for none; clusters begin at multiples of 64
    begin: Tensor  # (C + 1,) int32 first place of each cluster; the last: of tokens in none
    end: Tensor  # (C + 1,) int32 the place behind its last token


def worth_sorting(num_tokens: int, num_clusters: int) -> bool:
    return num_tokens >= FEWEST_TOKENS * num_clusters


@torch.library.custom_op("acmoe::sort_rows", mutates_args=())
def sort_rows(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order (N,), back (N,), end (E,) and the sorted experts (N,)."""
    from acmoe.ops.sort.triton.sort import sort_rows as launch

    return launch(expert_ids, num_experts)


@sort_rows.register_fake
def _(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = expert_ids.numel()
    return (
        expert_ids.new_empty(rows),
        expert_ids.new_empty(rows),
        expert_ids.new_empty(num_experts),
        expert_ids.new_empty(rows),
    )


@torch.library.custom_op("acmoe::sort_rows_and_tokens", mutates_args=())
def sort_rows_and_tokens(
    expert_ids: Tensor, cluster: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`sort_rows`, then token (X,), begin and end (C + 1,) of `Clusters`, in the same launches."""
    from acmoe.ops.sort.triton.sort import sort_rows_and_tokens as launch

    rows, tokens = launch(expert_ids, cluster, num_experts)
    return *rows, *tokens


@sort_rows_and_tokens.register_fake
def _(
    expert_ids: Tensor, cluster: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from acmoe.ops.sort.triton.sort import most_places

    rows = expert_ids.numel()
    tokens = cluster.new_empty(most_places(cluster.numel(), num_experts), dtype=torch.int32)
    return (
        expert_ids.new_empty(rows),
        expert_ids.new_empty(rows),
        expert_ids.new_empty(num_experts),
        expert_ids.new_empty(rows),
        tokens,
        tokens.new_empty(num_experts + 1),
        tokens.new_empty(num_experts + 1),
    )
