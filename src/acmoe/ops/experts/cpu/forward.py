"""The experts on a CPU: the definition, in fewer calls.

The definition checks at each of its steps whether the call is traced, autocast or differentiated.
In a small layer these checks take as long as the products. This kernel checks once, and then makes
the products of the definition, with the same bits. With gradients it records one autograd function
(gradient.py). A single token has its own form (one_token.py). docs/performance/cpu.md has the
times.

T tokens, K experts per token, N = T * K rows, D features, F hidden units, W = F (or 2F for swiglu).
"""

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager
from acmoe.ops.experts.cpu.bags import sum_of_choices
from acmoe.ops.experts.cpu.by_expert import by_expert
from acmoe.ops.experts.cpu.gradient import expert_mlp_with_gradient
from acmoe.ops.experts.cpu.one_token import expert_mlp_of_one_token
from acmoe.ops.experts.reference import ExpertWeights, activated, tokens_of
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.sort.reference import Rows


def unsupported(
    x: Tensor, weights: ExpertWeights, gate: Tensor, dropout: float, complete: bool
) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    if x.device.type != "cpu":
        return "it is for CPUs"
    if x.shape[0] == 0 or not complete:
        return "it serves tokens whose rows all have an expert"
    if not eager(x, *weights, gate):
        return "it is traced"
    if x.dtype not in (torch.float32, torch.float64):
        return "it takes float32 and float64"
    for one in (*weights, gate):
        if one is not None and one.dtype != x.dtype:
            return "it takes tokens, weights and gates of one dtype"
    if torch.is_autocast_enabled("cpu"):
        return "under autocast its products would be narrow"
    if dropout > 0:
        return "it has no dropout"
    return None


def expert_mlp_in_few_calls(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
    complete: bool = False,
) -> Tensor:
    """Compute `expert_mlp`, (T, D), without dropout, for rows that all have an expert."""
    if records_gradient(x, *weights, gate):
        return expert_mlp_with_gradient(x, weights, rows, gate, activation)
    if x.shape[0] == 1:
        return expert_mlp_of_one_token(x, weights, rows, gate, activation=activation)
    x_ND = x.index_select(0, tokens_of(rows.permutation, gate.shape[1]))
    offsets_E = rows.offsets.to(torch.int32)  # once: torch's grouped GEMM reads int32
    h_NW = by_expert(x_ND, weights.up, offsets_E, weights.up_bias, rows.expert)
    h_NF = activated(h_NW, activation)
    y_ND = by_expert(h_NF, weights.down, offsets_E, weights.down_bias, rows.expert)
    return sum_of_choices(y_ND, rows.inverse, gate)
