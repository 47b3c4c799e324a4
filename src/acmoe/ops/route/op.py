"""Register the fused Triton kernel of the op `route`.

One kernel reads each token once and writes its affinities, chosen experts and gates, and the sums
that the balance loss needs.

T tokens, D features, E experts, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.route.autograd import route_through
from acmoe.ops.route.reference import Route, check_route, gate_sum, route
from acmoe.ops.route.tokens import ScaledTokens, check_clusters
from acmoe.ops.sort.order import TokenOrder, worth_routing_sorted

_MOST_EXPERTS, _MOST_CHOICES = 512, 16


def unsupported(tokens: ScaledTokens, embedding: Tensor, top_k: int) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    if tokens.x.numel() == 0:
        return "there are no tokens"
    num_experts = embedding.shape[0]
    if num_experts > _MOST_EXPERTS or top_k > _MOST_CHOICES:
        return (
            f"its kernel serves {_MOST_EXPERTS} experts and k = {_MOST_CHOICES}, not {num_experts} "
            f"and {top_k}"
        )
    if tokens.scale is not None and tokens.scale.requires_grad and torch.is_grad_enabled():
        return "its kernel has no gradient for the scale"
    return triton_unsupported(tokens.rows())


@route.register("triton", unsupported=unsupported)
def fused_route(
    tokens: ScaledTokens,
    embedding: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float | None = None,
    noise: Tensor | None = None,
    balance_only: bool = False,
) -> Route:
    check_route(tokens, embedding, top_k, token_mask, noise)
    if tokens.scale is not None and tokens.assignment is not None:
        check_clusters(tokens.scale, tokens.assignment)
    scale_CD = tokens.scale
    if scale_CD is not None and (scale_CD.requires_grad or scale_CD.dtype != torch.float32):
        scale_CD = scale_CD.detach().float()
    order = _order(tokens) if token_mask is None else None
    totals = "none"
    if temperature is not None:
        plain = token_mask is None and noise is None
        totals = "balance" if balance_only and plain else "sums"
    expert_ids, gate, affinity, sums, load, first, x, balance = route_through(
        tokens.rows(),
        embedding,
        bias,
        scale_CD,
        None if scale_CD is None else tokens.assignment,
        top_k,
        over_selected,
        token_mask,
        1.0 if temperature is None else temperature,
        None if order is None else order.token,
        None if order is None else order.end,
        None if noise is None else noise.detach().float(),
        totals=totals,
    )
    same = x.shape == tokens.x.shape
    clean = affinity if noise is None else affinity - noise  # exact up to rounding
    if noise is not None and temperature is not None:
        sums = gate_sum(clean, temperature, token_mask)  # those of the kernel include the noise
    return Route(
        expert_ids,
        gate,
        affinity,
        clean,
        first,
        tokens.x if tokens.product is not None else x if same else x.view(tokens.x.shape),
        None if temperature is None or balance is not None else sums,
        None if temperature is None or balance is not None else load,
        balance,
    )


def _order(tokens: ScaledTokens) -> TokenOrder | None:
    """Return the order of tokens that are sorted by cluster; None if they are read as they lie."""
    if tokens.scale is None or tokens.order is None:
        return None
    num_clusters = tokens.scale.shape[0]
    if not worth_routing_sorted(tokens.x.numel() // tokens.x.shape[-1], num_clusters):
        return None
    return TokenOrder.unpack(tokens.order, num_clusters)
