"""The MoE layer in plain PyTorch: the router that baselines share, and a layer for torch.compile.

T tokens, D features, E experts, K experts per token, N = T * K routed rows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.lab.bench.implementations.weights import Weights
from acmoe.lab.bench.shapes import Shape


def route(x_TD: Tensor, embedding_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the top-k experts (T, K) and their gates (T, K).

    The gates are the softmax over the k affinities, or over all of them if k is 1.
    """
    affinity_TE = F.linear(x_TD, embedding_ED).float()
    best_TK, expert_ids_TK = affinity_TE.topk(top_k, dim=-1)
    if top_k > 1:
        return expert_ids_TK, best_TK.softmax(-1)
    return expert_ids_TK, affinity_TE.softmax(-1).gather(1, expert_ids_TK)


def activate(h: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.relu(h) if activation == "relu" else F.gelu(h)


def grouped_layer(x_TD: Tensor, weights: Weights, shape: Shape) -> Tensor:
    """Sort rows by expert, run one grouped GEMM per matrix, and add the gated rows by token."""
    expert_ids_TK, gate_TK = route(x_TD, weights.embedding, shape.top_k)
    expert_N, permutation_N = expert_ids_TK.flatten().sort()
    ids_E = torch.arange(shape.num_experts, device=x_TD.device)
    offsets_E = torch.searchsorted(expert_N, ids_E, right=True, out_int32=True)
    token_N = permutation_N // shape.top_k
    h_NW = F.grouped_mm(x_TD[token_N], weights.up.mT, offs=offsets_E)
    if weights.up_bias is not None:
        h_NW = h_NW + weights.up_bias[expert_N]
    y_ND = F.grouped_mm(activate(h_NW, shape.activation), weights.down.mT, offs=offsets_E)
    if weights.down_bias is not None:
        y_ND = y_ND + weights.down_bias[expert_N]
    y_ND = y_ND * gate_TK.flatten()[permutation_N, None].to(y_ND.dtype)
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)
