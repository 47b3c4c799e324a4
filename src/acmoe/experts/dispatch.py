"""Move tokens to their experts and back: sort once, use twice, no atomics.

T tokens, K experts per token, N = T * K routed rows, D features, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.sort.op import Clusters, sort_rows, sort_rows_and_tokens
from acmoe.routing.router import real_tokens
from acmoe.routing.state import Routing


class Order(NamedTuple):
    """Routed rows sorted by expert. Row r of token t, choice k is r = t * K + k before sorting."""

    order: Tensor  # (N,) the row that stands at each sorted place
    back: Tensor  # (N,) the sorted place of each row
    end: Tensor  # (E,) where each expert's rows end; rows for no expert stand behind the last
    expert: Tensor  # (N,) sorted expert ids
    clusters: Clusters | None = None  # the tokens sorted by cluster, where that was asked for


def sort_by_expert(
    expert_ids_TK: Tensor,
    num_experts: int,
    *,
    backend: str = "torch",
    assignment_T1: Tensor | None = None,
    token_mask_T: Tensor | None = None,
) -> Order:
    """Stable, so that an expert sees its tokens in their own order. No host sync.

    assignment_T1: sort the tokens by these clusters in the same launches, masked ones into none; a
    backend that has no such launches leaves it.
    """
    if backend == "triton" and expert_ids_TK.numel() > 0:
        if assignment_T1 is None:
            return Order(*sort_rows(expert_ids_TK, num_experts))
        cluster_T = assignment_T1[:, 0]
        if token_mask_T is not None:
            cluster_T = cluster_T.masked_fill(~token_mask_T, -1)
        found = sort_rows_and_tokens(expert_ids_TK, cluster_T, num_experts)
        order, back, ends, expert, token, begin, end = found
        return Order(order, back, ends, expert, Clusters(assignment_T1, token, begin, end))
    expert_N, order_N = expert_ids_TK.reshape(-1).sort(stable=True)
    back_N = torch.empty_like(order_N).scatter_(
        0, order_N, torch.arange(order_N.numel(), device=order_N.device)
    )
    ids_E = torch.arange(num_experts, device=order_N.device)
    end_E = torch.searchsorted(expert_N, ids_E, right=True)
    return Order(order_N, back_N, end_E, expert_N)


def dispatch(x_TD: Tensor, order: Order) -> Tensor:
    """(N, D): each token's row once for every expert it goes to, sorted by expert."""
    rows_ND: Tensor = _Dispatch.apply(x_TD, order.order, order.back)  # type: ignore[no-untyped-call]
    return rows_ND


def combine(y_ND: Tensor, gate_TK: Tensor, order: Order) -> Tensor:
    """(T, D): each token's expert outputs weighted by its gate, summed in the order of choice."""
    T, K = gate_TK.shape
    rows_ND: Tensor = _Permute.apply(y_ND, order.back, order.order)  # type: ignore[no-untyped-call]
    y_TKD = rows_ND.view(T, K, y_ND.shape[-1])
    return (y_TKD * gate_TK.to(y_ND.dtype)[..., None]).sum(1)


class _Dispatch(torch.autograd.Function):
    """x[order // K]; the backward gathers and sums over K instead of scattering with atomics."""

    @staticmethod
    def forward(x_TD: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        top_k = order_N.numel() // max(x_TD.shape[0], 1)
        return x_TD[order_N // max(top_k, 1)]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[2])
        ctx.num_tokens = inputs[0].shape[0]

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[no-untyped-def]
        (back_N,) = ctx.saved_tensors
        if ctx.num_tokens == 0:
            return grad_ND.new_zeros(0, grad_ND.shape[-1]), None, None
        return grad_ND[back_N].view(ctx.num_tokens, -1, grad_ND.shape[-1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """y[index]; since it is a permutation, the backward is a gather with the inverse one."""

    @staticmethod
    def forward(y_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
        return y_ND[index_N]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[no-untyped-def]
        (inverse_N,) = ctx.saved_tensors
        return grad_ND[inverse_N], None, None


def limit_capacity(
    routing: Routing,
    num_experts: int,
    top_k: int,
    factor: float,
    token_mask_T: Tensor | None = None,
) -> Routing:
    """Drop what exceeds k * floor(factor * ceil(T / E)) rows of an expert (Tutel's semantics).

    First choices fill before second ones; among equals, tokens of larger greatest gate go first.
    A dropped row has expert id E and gate 0; `affinity` still holds the choice before dropping.
    """
    T, K = routing.expert_ids.shape
    priority_T = routing.gate.detach().amax(-1)
    tokens = real_tokens(routing.gate, token_mask_T)
    expert_ids_TK = routing.expert_ids
    if token_mask_T is not None:
        expert_ids_TK = expert_ids_TK.masked_fill(~token_mask_T[:, None], num_experts)
    # float64, as Python counts: in float32 1.05 * 120 falls short of 126.
    per_choice = (factor * (tokens / num_experts).ceil()).floor()
    capacity = top_k * per_choice  # K may be larger: a threshold router has a column per expert

    # Queue all rows by (choice, priority), then stably by expert: a row's place in its expert's
    # stretch is its rank there.
    by_priority_T = priority_T.argsort(descending=True, stable=True)
    queue_N = expert_ids_TK[by_priority_T].T.reshape(-1)
    sorted_N, order_N = queue_N.sort(stable=True)
    first_N = torch.searchsorted(sorted_N, sorted_N)
    rank_sorted_N = torch.arange(T * K, device=queue_N.device) - first_N
    rank_N = torch.empty_like(rank_sorted_N).scatter_(0, order_N, rank_sorted_N)
    rank_TK = torch.empty_like(expert_ids_TK)
    rank_TK[by_priority_T] = rank_N.view(K, T).T

    kept_TK = (rank_TK < capacity) & (expert_ids_TK < num_experts)
    return routing._replace(
        expert_ids=torch.where(kept_TK, expert_ids_TK, num_experts),
        gate=routing.gate.masked_fill(~kept_TK, 0.0),
    )
