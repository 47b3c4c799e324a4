"""Routing in one op: affinity, choice, gate, and what the balance loss sums over tokens.

T tokens, D features, E experts, C clusters, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.checks import check_token_mask
from acmoe.ops.route.autograd import route_through
from acmoe.ops.sort.op import Clusters
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.dispersion_op import check_clusters, check_kernel_dtype


class Route(NamedTuple):
    """What a router needs of its tokens, and what its losses do."""

    expert_ids: Tensor  # (T, K) int64, best first; of equals the lower index; column 0 is argmax
    gate: Tensor  # (T, K) softmax over the chosen, or their part of the softmax over all
    affinity: Tensor  # (T, E), noise included
    gate_sum: Tensor  # (E,) softmax of affinity / temperature, summed over tokens that count
    load: Tensor  # (E,) how many of those tokens chose each expert; no gradient
    first: Tensor  # (T,) int64, column 0 of expert_ids in a tensor of its own
    x: Tensor  # (T, D) x, for who reads it after the router: gradients then meet on the way


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
    clusters: Clusters | None = None,
    noise: Tensor | None = None,
) -> Route:
    """Route x (T, D) by (x * scale[assignment]) @ embedding^T + bias + noise, in float32.

    embedding   (E, D), and bias (E,) or None
    scale       (C, D) float32, a constant: no gradient flows to it; None for the plain router
    assignment  (T,) cluster of each token; -1 for none, which keeps the token as it is
    token_mask  (T,) False for padding: read as zeros, whatever it holds, and summed nowhere
    clusters    the tokens sorted by `assignment`: the same result, to rounding, sooner
    noise       (T, E), a constant: what is chosen, gated and summed has it

    `route_reference` says the same in plain PyTorch.
    """
    _check(x, embedding, scale, assignment, top_k, token_mask, noise)
    check_kernel_dtype(x)
    return Route(
        *route_through(
            x,
            embedding,
            bias,
            None if scale is None else scale.detach().float(),
            assignment,
            top_k,
            gate_over_selected,
            token_mask,
            temperature,
            None if clusters is None else clusters.token,
            None if clusters is None else clusters.end,
            None if noise is None else noise.detach().float(),
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
    noise: Tensor | None = None,
) -> Route:
    """The specification of `fused_route`."""
    _check(x, embedding, scale, assignment, top_k, token_mask, noise)
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
    if noise is not None:
        affinity_TE = affinity_TE + noise.detach().to(wide)
    order_TE = affinity_TE.detach().sort(dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, :top_k].contiguous()
    if gate_over_selected:
        gate_TK = affinity_TE.gather(1, ids_TK).softmax(-1)
    else:
        gate_TK = affinity_TE.softmax(-1).gather(1, ids_TK)
    share_TE = (affinity_TE / temperature).softmax(-1).masked_fill(~keep_T1, 0.0)
    chosen_TE = torch.zeros_like(affinity_TE).scatter(1, ids_TK, 1.0).masked_fill(~keep_T1, 0.0)
    load_E = chosen_TE.sum(0).detach()
    first_T = ids_TK[:, 0].clone()
    return Route(ids_TK, gate_TK, affinity_TE, share_TE.sum(0), load_E, first_T, x)


def _check(
    x: Tensor,
    embedding: Tensor,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    token_mask: Tensor | None,
    noise: Tensor | None,
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
    if noise is not None:
        check(
            noise.shape == (x.shape[0], E),
            f"noise has shape {tuple(noise.shape)}; {x.shape[0]} tokens and {E} experts need "
            f"{(x.shape[0], E)}",
        )
    if scale is not None and assignment is not None:
        check(
            assignment.shape == x.shape[:1] and scale.shape[1:] == x.shape[1:],
            f"assignment {tuple(assignment.shape)} and scale {tuple(scale.shape)} do not fit x "
            f"{tuple(x.shape)}; pass (tokens,) and (clusters, features)",
        )
        check_clusters(assignment, scale.shape[0])
