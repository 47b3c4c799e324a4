"""How much two routings of the same tokens differ.

N tokens, C clusters of one routing, E experts, K experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from acmoe.errors import check
from acmoe.evaluate.measures import Instability, instability


def contingency(first_N: Tensor, second_N: Tensor, num_experts: int) -> Tensor:
    """(C, E) tokens in each pair of clusters: all that pairs of tokens can tell, without them."""
    pair_N = first_N * num_experts + second_N
    return torch.bincount(pair_N, minlength=num_experts**2).view(num_experts, num_experts)


def cluster_change(first_N: Tensor, second_N: Tensor, num_experts: int) -> Instability:
    """Of two clusterings, whatever their labels: instability, its chance level, adjusted Rand."""
    return instability(contingency(first_N, second_N, num_experts))


def moved(first_N: Tensor, second_N: Tensor) -> float:
    """Share of tokens whose first choice is another expert."""
    return float((first_N != second_N).double().mean())


def overlap(first_NK: Tensor, second_NK: Tensor, num_experts: int) -> Tensor:
    """(N,) share of a token's experts that both routings chose.

    |A and B| / max(|A|, |B|), which is |A and B| / K where every token has K experts; two routings
    to no expert at all agree.
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
    """(N, E) bool; the id E, "no expert", is left out."""
    counts_NE: Tensor = functional.one_hot(ids_NK, num_experts + 1).sum(1)[:, :num_experts]
    return counts_NE > 0
