"""Measure how much two routings of the same tokens differ.

N tokens, C clusters of one routing, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.errors import check
from acmoe.evaluate.measures import Instability, instability


def contingency(first_N: Tensor, second_N: Tensor, num_experts: int) -> Tensor:
    """Count the tokens in each pair of clusters, (C, E).

    Every measure of token pairs follows from these counts, without listing the pairs.
    """
    pair_N = first_N * num_experts + second_N
    return torch.bincount(pair_N, minlength=num_experts**2).view(num_experts, num_experts)


def cluster_change(first_N: Tensor, second_N: Tensor, num_experts: int) -> Instability:
    """Return instability, its chance level and the adjusted Rand index of two clusterings.

    The result does not depend on how clusters are numbered.
    """
    return instability(contingency(first_N, second_N, num_experts))


def moved(first_N: Tensor, second_N: Tensor) -> float:
    """Return the share of tokens whose first expert differs."""
    return float((first_N != second_N).double().mean())


def overlap(first_NK: Tensor, second_NK: Tensor, num_experts: int) -> Tensor:
    """Return the share of each token's experts that both routings chose, (N,).

    For the sets of experts A and B it is |A and B| / max(|A|, |B|), which is |A and B| / K where
    every token has K experts. If both sets are empty it is 1.
    """
    check(
        len(first_NK) == len(second_NK),
        f"{len(first_NK)} and {len(second_NK)} tokens; overlap needs the same ones twice",
    )
    first_NE, second_NE = (_chosen(ids_NK, num_experts) for ids_NK in (first_NK, second_NK))
    both_N = (first_NE & second_NE).sum(-1).double()
    most_N = torch.maximum(first_NE.sum(-1), second_NE.sum(-1))
    return torch.where(most_N > 0, both_N / most_N.clamp(min=1), 1.0)


def _chosen(ids_NK: Tensor, num_experts: int) -> Tensor:
    """Return which experts each token chose, (N, E) bool. The id E means "no expert"."""
    counts_NE: Tensor = functional.one_hot(ids_NK, num_experts + 1).sum(1)[:, :num_experts]
    return counts_NE > 0
