"""Tokens for the tests of kernels that read tokens sorted by cluster.

T = 200 tokens of C = 5 clusters: some larger than a stretch of 64 places, one empty, one of a
single token, some tokens in none. D = 70 features: no multiple of a block. E experts, K per token.
"""

import torch
from route_cases import sorted_by
from torch import Tensor

from acmoe.ops.sort.order import TokenOrder

T, D, C, E, K = 200, 70, 5, 5, 2


def drawn_assignment(generator: torch.Generator) -> Tensor:
    """(T, 1): cluster 3 has one token, cluster 4 none; about a seventh are in no cluster."""
    assignment = torch.randint(-1, 6, (T, 1), generator=generator).clamp(max=2)
    assignment[assignment == 1] = 2  # about 4/7 of all tokens
    assignment[50:60] = 1
    assignment[17] = 3
    return assignment


def sort(assignment_T1: Tensor, clusters: int = C) -> TokenOrder:
    found = TokenOrder.unpack(sorted_by(assignment_T1[:, 0], clusters), clusters)
    assert found is not None
    return found
