"""Register the faster kernels of the op `route`.

triton   one kernel reads each token once and writes its affinities, chosen experts and gates, and
         the sums that the balance loss needs
native   small calls on a CPU, in C (native.py)
cpu      few tokens without gradients, ranked by torch.topk (cpu.py)

T tokens, D features, E experts, C clusters.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acmoe.ops.checks import check_clusters
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.route import cpu, native
from acmoe.ops.route.autograd import route_through
from acmoe.ops.route.reference import Route, check_route, gate_sum, route
from acmoe.ops.route.tokens import ScaledTokens
from acmoe.ops.sort.order import TokenOrder, worth_routing_sorted

_MOST_EXPERTS, _MOST_CHOICES = 512, 16
_MOST_SCALES = 2**31
MOST_WEIGHTS = 16  # weights of the balance loss that kernels multiply by


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
    if tokens.scale is not None and tokens.scale.numel() >= _MOST_SCALES:
        return f"its kernel finds a scale by 32 bits, too few for {tokens.scale.numel()} numbers"
    return triton_unsupported(tokens.rows())


@route.register("triton", unsupported=unsupported, by_triton=True)
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
    balance_weight: float | None = None,
) -> Route:
    check_route(tokens, embedding, top_k, token_mask, noise)
    scale_CD = assignment_T = slot_token = slot_end = None
    if tokens.scale is not None:
        scale_CD, assignment_T = _constant_scale(tokens.scale, tokens.assignment)
        if token_mask is None and tokens.order is not None:
            slot_token, slot_end = _slots(tokens.x, tokens.order, tokens.scale.shape[0])
    # Eager calls without mask and noise may return `balance`, others `gate_sum` and `load`.
    sums_only = temperature is None or token_mask is not None or noise is not None or is_compiling()
    weight = None if sums_only or balance_weight is None else float(balance_weight)
    factor = 1.0 if weight is None else _repeated_weight(weight)
    expert_ids, gate, affinity, sums, load, first, x, balance = route_through(
        tokens.rows(),
        embedding,
        bias,
        scale_CD,
        assignment_T,
        top_k,
        over_selected,
        token_mask,
        1.0 if temperature is None else temperature,
        slot_token,
        slot_end,
        None if noise is None else noise.detach().float(),
        totals=_totals(temperature, weight is not None),
        weight=factor,
    )
    if temperature is None and balance_weight != 0:
        balance = None  # the kernel wrote a zero, which is the loss only if its weight is 0
    clean = affinity if noise is None else affinity - noise  # exact up to rounding
    if balance is not None and weight is not None and factor != weight:
        balance = weight * balance  # the kernel has multiplied by a factor of 1
    if temperature is None or balance is not None:
        sums = load = None
    elif noise is not None:
        sums = gate_sum(clean, temperature, token_mask)  # the kernel's sums include the noise
    x = _unscaled(tokens, x)
    return Route(expert_ids, gate, affinity, clean, first, x, sums, load, balance)


route.register("native", unsupported=native.unsupported)(native.route_in_c)
route.register("cpu", unsupported=cpu.unsupported)(cpu.route_few_tokens)


def _constant_scale(scale_CD: Tensor, assignment_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the scale (C, D), in float32 and without gradient, and the assignment (T,)."""
    if assignment_T is not None:
        check_clusters(assignment_T, scale_CD.shape[0])
    if scale_CD.requires_grad or scale_CD.dtype != torch.float32:
        scale_CD = scale_CD.detach().float()
    return scale_CD, assignment_T


def _slots(x: Tensor, order: Tensor, num_clusters: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the token of each slot and the end of each cluster, of tokens sorted by cluster.

    Both are None where the kernel reads the tokens in their own order.
    """
    if not worth_routing_sorted(x.numel() // x.shape[-1], num_clusters):
        return None, None
    clusters = TokenOrder.unpack(order, num_clusters)
    return (None, None) if clusters is None else (clusters.token, clusters.end)


def _totals(temperature: float | None, balance_suffices: bool) -> str:
    """Return the `totals` of `route_through`: "none", "sums", or "balance" for their loss alone."""
    if temperature is None:
        return "none"
    return "balance" if balance_suffices else "sums"


_weights: set[float] = set()  # weights by which kernels have multiplied the balance loss


def _repeated_weight(weight: float) -> float:
    """Return the weight by which the kernel multiplies; 1: the caller must multiply.

    The weight belongs to the kind of a recorded call. A weight that changes in every step would
    record a call in every step, which takes a thousand times as long as a repetition.
    """
    if weight not in _weights:
        if len(_weights) >= MOST_WEIGHTS:
            return 1.0
        _weights.add(weight)
    return weight


def _unscaled(tokens: ScaledTokens, x: Tensor) -> Tensor:
    """Return the input tokens, shaped as `tokens.x`, for the layers after the router.

    x: the rows that `route_through` returns, which are the input tokens unless `product` is given.
    """
    if tokens.product is not None:
        return tokens.x
    return x if x.shape == tokens.x.shape else x.view(tokens.x.shape)
