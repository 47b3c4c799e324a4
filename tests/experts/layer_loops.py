"""The MoE layer as two loops, over tokens and over their experts, in float64.

D features, F hidden units, E experts.
"""

import math

import torch
from torch import Tensor


def expert(x_D: Tensor, weights: dict[str, Tensor], e: int, activation: str) -> Tensor:
    """One expert of one token, by the textbook."""
    hidden = weights["up"][e] @ x_D
    if "up_bias" in weights:
        hidden = hidden + weights["up_bias"][e]
    if activation == "relu":
        hidden = hidden.clamp(min=0)
    elif activation == "gelu":
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    else:
        gate, up = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
        hidden = gate / (1 + torch.exp(-gate)) * up
    y_D = weights["down"][e] @ hidden
    return y_D + weights["down_bias"][e] if "down_bias" in weights else y_D


def layer(
    x_TD: Tensor,
    expert_ids: list[list[int]],
    gate: list[list[Tensor]],
    weights: dict[str, Tensor],
    activation: str,
) -> Tensor:
    """(T, D) sum over each token's experts of gate times expert; the id E is no expert."""
    num_experts = len(weights["up"])
    outputs = []
    for x_D, ids, gates in zip(x_TD, expert_ids, gate, strict=True):
        y_D = torch.zeros_like(x_D)
        for e, g in zip(ids, gates, strict=True):
            if e < num_experts:
                y_D = y_D + g * expert(x_D, weights, e, activation)
        outputs.append(y_D)
    return torch.stack(outputs) if outputs else torch.zeros_like(x_TD)


def top_k(affinity_TE: Tensor, k: int, over: str) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Best experts first, and their softmax over the selected or over all."""
    ids, gates = [], []
    for row in affinity_TE:
        order = sorted(range(len(row)), key=lambda e: -row[e].item())[:k]
        powers = [torch.exp(row[e] - row.max().item()) for e in range(len(row))]
        total = sum(powers[e] for e in (order if over == "selected" else range(len(row))))
        ids.append(order)
        gates.append([powers[e] / total for e in order])
    return ids, gates


def within_capacity(
    expert_ids: list[list[int]],
    gate: list[list[float]],
    num_experts: int,
    top_k: int,
    factor: float,
    real: list[bool],
) -> list[list[bool]]:
    """Return True for rows that an expert takes: first choices first, then by larger gates."""
    capacity = top_k * int(factor * -(-sum(real) // num_experts))
    taken = [0] * num_experts
    kept = [[False] * len(ids) for ids in expert_ids]
    tokens = sorted(range(len(gate)), key=lambda t: (-max(gate[t]), t))
    for choice in range(len(expert_ids[0]) if expert_ids else 0):
        for t in tokens:
            e = expert_ids[t][choice]
            if real[t] and e < num_experts and taken[e] < capacity:
                taken[e] += 1
                kept[t][choice] = True
    return kept
