"""Routing in one op: affinity, choice, gate, and what the balance loss sums over tokens.

T tokens, D features, E experts, C clusters, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.checks import check_token_mask
from acmoe.ops.dispersion import accumulation_dtype
from acmoe.ops.fused_dispersion import check_clusters, check_kernel_dtype


class Route(NamedTuple):
    """What a router needs of its tokens, and what its losses do."""

    expert_ids: Tensor  # (T, K) int64, best first; of equals the lower index; column 0 is argmax
    gate: Tensor  # (T, K) softmax over the chosen, or their part of the softmax over all
    affinity: Tensor  # (T, E)
    gate_sum: Tensor  # (E,) softmax of affinity / temperature, summed over tokens that count
    load: Tensor  # (E,) how many of those tokens chose each expert; no gradient


def fused_route(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    gate_over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Route:
    """Route x (T, D) by affinity = (x * scale[assignment]) @ embedding^T + bias, in float32.

    embedding   (E, D), and bias (E,) or None
    scale       (C, D) float32, a constant: no gradient flows to it; None for the plain router
    assignment  (T,) cluster of each token; -1 for none, which keeps the token as it is
    token_mask  (T,) False for padding: read as zeros, whatever it holds, and summed nowhere

    `route_reference` says the same in plain PyTorch.
    """
    _check(x, embedding, scale, assignment, top_k, token_mask)
    check_kernel_dtype(x)
    return Route(
        *route_op(
            x,
            embedding,
            bias,
            None if scale is None else scale.detach().float(),
            assignment,
            top_k,
            gate_over_selected,
            token_mask,
            temperature,
        )
    )


def route_reference(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    gate_over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Route:
    """The specification of `fused_route`."""
    _check(x, embedding, scale, assignment, top_k, token_mask)
    wide = accumulation_dtype(x.dtype)
    keep_T1 = torch.ones_like(x[:, :1], dtype=torch.bool)
    if token_mask is not None:
        keep_T1 = token_mask[:, None]
    x_TD = x.to(wide).masked_fill(~keep_T1, 0.0)
    if scale is not None and assignment is not None:
        scale_TD = scale.detach().to(wide)[assignment.clamp(min=0)]
        x_TD = x_TD * scale_TD.masked_fill((assignment < 0)[:, None], 1.0)
    bias_E = None if bias is None else bias.to(wide)
    affinity_TE = torch.nn.functional.linear(x_TD, embedding.to(wide), bias_E)
    order_TE = affinity_TE.detach().sort(dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, :top_k].contiguous()
    if gate_over_selected:
        gate_TK = affinity_TE.gather(1, ids_TK).softmax(-1)
    else:
        gate_TK = affinity_TE.softmax(-1).gather(1, ids_TK)
    share_TE = (affinity_TE / temperature).softmax(-1).masked_fill(~keep_T1, 0.0)
    chosen_TE = torch.zeros_like(affinity_TE).scatter(1, ids_TK, 1.0).masked_fill(~keep_T1, 0.0)
    return Route(ids_TK, gate_TK, affinity_TE, share_TE.sum(0), chosen_TE.sum(0).detach())


def _check(
    x: Tensor,
    embedding: Tensor,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    token_mask: Tensor | None,
) -> None:
    check(
        x.dim() == 2 and embedding.dim() == 2 and x.shape[1] == embedding.shape[1],
        f"x has shape {tuple(x.shape)} and embedding {tuple(embedding.shape)}; pass (tokens, "
        "features) and (experts, features)",
    )
    E = embedding.shape[0]
    check(1 <= top_k <= E, f"top_k={top_k}; it must lie between 1 and the {E} experts")
    check((scale is None) == (assignment is None), "scale and assignment come together or not")
    check_token_mask(x, token_mask)
    if scale is not None and assignment is not None:
        check(
            assignment.shape == x.shape[:1] and scale.shape[1:] == x.shape[1:],
            f"assignment {tuple(assignment.shape)} and scale {tuple(scale.shape)} do not fit x "
            f"{tuple(x.shape)}; pass (tokens,) and (clusters, features)",
        )
        check_clusters(assignment, scale.shape[0])


@torch.library.custom_op("acmoe::route", mutates_args=())
def route_op(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from acmoe.kernels.affinity import Tokens, route

    tokens = Tokens.of(x, scale, assignment, token_mask)
    return route(tokens, embedding, bias, top_k, over_selected, temperature)


@route_op.register_fake
def _(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    affinity = x.new_empty(x.shape[0], embedding.shape[0], dtype=torch.float32)
    gate = affinity.new_empty(x.shape[0], top_k)
    ids = gate.new_empty(gate.shape, dtype=torch.int64)
    gate_sum = affinity.new_empty(embedding.shape[0])
    return ids, gate, affinity, gate_sum, torch.empty_like(gate_sum)


@torch.library.custom_op("acmoe::route_backward", mutates_args=())
def route_backward_op(
    grad_gate: Tensor | None,
    grad_affinity: Tensor | None,
    grad_sum: Tensor | None,
    x: Tensor,
    embedding: Tensor,
    scale: Tensor | None,
    assignment: Tensor | None,
    token_mask: Tensor | None,
    expert_ids: Tensor,
    gate: Tensor,
    affinity: Tensor,
    over_selected: bool,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the embedding and of a bias (both float32)."""
    from acmoe.kernels.affinity import Tokens
    from acmoe.kernels.affinity_backward import (
        affinity_gradient,
        embedding_gradient,
        token_gradient,
    )

    tokens = Tokens.of(x, scale, assignment, token_mask)
    upstream = grad_gate, grad_affinity, grad_sum
    chosen = expert_ids, gate, affinity
    num_pieces = 3 if x.dtype == torch.float32 else 2
    grad_ZTE, grad_bias_E = affinity_gradient(
        *upstream, *chosen, token_mask, over_selected, temperature, num_pieces
    )
    grad_TD = token_gradient(tokens, grad_ZTE, embedding)
    return grad_TD, embedding_gradient(tokens, grad_ZTE), grad_bias_E


@route_backward_op.register_fake
def _(
    grad_gate: Tensor | None,
    grad_affinity: Tensor | None,
    grad_sum: Tensor | None,
    x: Tensor,
    embedding: Tensor,
    scale: Tensor | None,
    assignment: Tensor | None,
    token_mask: Tensor | None,
    expert_ids: Tensor,
    gate: Tensor,
    affinity: Tensor,
    over_selected: bool,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_embedding = affinity.new_empty(embedding.shape)
    return x.new_empty(x.shape), grad_embedding, affinity.new_empty(embedding.shape[0])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, embedding, bias, scale, assignment, _, ctx.over_selected, mask, ctx.temperature = inputs
    expert_ids, gate, affinity, _, load = output
    ctx.mark_non_differentiable(expert_ids, load)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, embedding, scale, assignment, mask, expert_ids, gate, affinity)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, _ids, grad_gate, grad_affinity, grad_sum, _load):  # type: ignore[no-untyped-def]
    grad_x, grad_embedding, grad_bias = route_backward_op(
        grad_gate, grad_affinity, grad_sum, *ctx.saved_tensors, ctx.over_selected, ctx.temperature
    )
    grad_embedding = grad_embedding.to(ctx.saved_tensors[1].dtype)
    grad_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
    return grad_x, grad_embedding, grad_bias, None, None, None, None, None, None


route_op.register_autograd(_backward, setup_context=_save)
