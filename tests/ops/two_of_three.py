"""A route of two tokens to two of three experts, worked out by hand, and the kernel of a route."""

import math
from typing import Any

import torch
from torch import Tensor

from acmoe.ops.dispatch import record_choices
from acmoe.ops.route import ScaledTokens, route

OPTIONS: dict[str, Any] = {"top_k": 2, "over_selected": True}
X_TD = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
EMBEDDING_ED = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])


def kernel_of(tokens: ScaledTokens, embedding: Tensor, *rest: Any, **options: Any) -> str:
    with record_choices() as choices:
        route(tokens, embedding, *(rest or (None,)), **{**OPTIONS, **options})
    return choices[0].kernel


def check_by_hand() -> None:
    """Route X_TD and compare: affinities, the best two, and a softmax over these."""
    found = route(ScaledTokens(X_TD), EMBEDDING_ED, None, **OPTIONS)
    assert found.affinity.tolist() == [[1, 2, -3], [3, 0, -3]]
    assert found.expert_ids.tolist() == [[1, 0], [0, 1]]
    assert found.first.tolist() == [1, 0]
    first = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))]
    gate = torch.tensor([[first[0], 1 - first[0]], [first[1], 1 - first[1]]])
    torch.testing.assert_close(found.gate, gate)
    assert found.gate_sum is None and found.load is None and found.x is X_TD
