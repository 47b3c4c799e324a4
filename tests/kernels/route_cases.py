"""Tokens, experts and clusters for the fused router, and how exact it can be on them.

T = 37 tokens, D = 70 features, E = 5 experts, C = 7 clusters, K = 3 experts per token: nothing is a
multiple of a block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from acmoe.ops.route.op import fused_route as kernel
from acmoe.ops.route.tokens import ScaledTokens
from acmoe.ops.sort.op import sort_with_tokens_op

T, D, E, C, K = 37, 70, 5, 7, 3
NOISY = [  # dtype, scaled, over selected, masked, sorted by cluster
    (torch.float32, True, True, True, False),
    (torch.float32, True, False, False, True),
    (torch.float32, False, True, False, False),
    (torch.bfloat16, True, False, False, False),
    (torch.bfloat16, True, True, True, True),
    (torch.bfloat16, False, False, True, False),
]


class Route(NamedTuple):
    """The results of the kernel that are compared."""

    expert_ids: Tensor
    gate: Tensor
    affinity: Tensor
    gate_sum: Tensor
    load: Tensor
    first: Tensor
    x: Tensor


def sorted_by(assignment: Tensor, num_clusters: int) -> Tensor:
    """The packed order of tokens by cluster."""
    return sort_with_tokens_op(assignment.clamp(min=0)[:, None], assignment, num_clusters)[4]


def fused_route(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float = 1.0,
    order: Tensor | None = None,
    noise: Tensor | None = None,
) -> Route:
    """The registered kernel, whatever the machine."""
    found = kernel(
        ScaledTokens(x, scale, assignment, order),
        embedding,
        bias,
        top_k=top_k,
        over_selected=over_selected,
        token_mask=token_mask,
        temperature=temperature,
        noise=noise,
    )
    return Route(*(getattr(found, name) for name in Route._fields))


def check_zero_loss(case: dict[str, Any], order: Tensor | None = None) -> None:
    """Check that the kernel writes the loss of a router whose weight of the balance loss is 0."""
    for learned in (False, True):
        found = kernel(
            ScaledTokens(case["x"].detach(), case["scale"], case["assignment"], order),
            case["embedding"].detach().requires_grad_(learned),
            case["bias"],
            top_k=2,
            over_selected=True,
            balance_weight=0.0,
        )
        assert found.balance is not None
        assert found.balance.tolist() == 0.0
        assert (found.gate.requires_grad, found.balance.requires_grad) == (learned, False)
        assert (found.gate_sum, found.load) == (None, None)


def route_reference(
    x: Tensor,
    embedding: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    assignment: Tensor | None,
    top_k: int,
    over_selected: bool,
    token_mask: Tensor | None = None,
    temperature: float = 1.0,
    noise: Tensor | None = None,
) -> Route:
    """The specification: of equal affinities the lower index first, padding read as zeros."""
    keep_T1 = torch.ones_like(x[:, :1], dtype=torch.bool)
    if token_mask is not None:
        keep_T1 = token_mask[:, None]
    x_TD = x.masked_fill(~keep_T1, 0.0)
    if scale is not None and assignment is not None:
        scale_TD = scale.detach()[assignment.clamp(min=0)]
        x_TD = x_TD * scale_TD.masked_fill((assignment < 0)[:, None], 1.0)
    clean_TE = torch.nn.functional.linear(x_TD, embedding, bias)
    affinity_TE = clean_TE if noise is None else clean_TE + noise.detach().to(clean_TE.dtype)
    order_TE = affinity_TE.detach().sort(dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, :top_k].contiguous()
    if over_selected:
        gate_TK = affinity_TE.gather(1, ids_TK).softmax(-1)
    else:
        gate_TK = affinity_TE.softmax(-1).gather(1, ids_TK)
    share_TE = (clean_TE / temperature).softmax(-1).masked_fill(~keep_T1, 0.0)
    chosen_TE = torch.zeros_like(affinity_TE).scatter(1, ids_TK, 1.0).masked_fill(~keep_T1, 0.0)
    load_E = chosen_TE.sum(0).detach()
    return Route(ids_TK, gate_TK, affinity_TE, share_TE.sum(0), load_E, ids_TK[:, 0], x)


def drawn(
    generator: torch.Generator, device: str, dtype: torch.dtype, scaled: bool
) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    case: dict[str, Any] = {
        "x": normal(T, D).to(dtype),
        "embedding": normal(E, D) / D**0.5,
        "bias": normal(E) if scaled else None,
        "scale": normal(C, D).exp() if scaled else None,
        "assignment": None,
    }
    if scaled:
        case["assignment"] = torch.randint(-1, C, (T,), generator=generator).to(device)
    return case


def wide(case: dict[str, Any]) -> dict[str, Any]:
    floats = ("x", "embedding", "bias", "scale")
    return {
        name: value.detach().double() if name in floats and value is not None else value
        for name, value in case.items()
    }


def leaves(case: dict[str, Any]) -> list[Tensor]:
    names = ("x", "embedding", "bias")
    return [case[name].requires_grad_() for name in names if case[name] is not None]


def differentiable(route: Route) -> list[Tensor]:
    return [route.gate, route.affinity, route.gate_sum]


def lost_by_terms(exact: dict[str, Any], dtype: torch.dtype, mask: Tensor | None) -> float:
    """Return the error that 4 terms may add to an affinity of 16-bit tokens (ops/device/dot.py).

    At most 2^-17 of each product, of either sign: twice their root sum of squares is rare.
    """
    if dtype == torch.float32:
        return 0.0
    x = exact["x"].detach()
    if exact["scale"] is not None:
        own = exact["assignment"].clamp(min=0)
        x = x * exact["scale"][own].masked_fill((exact["assignment"] < 0)[:, None], 1.0)
    if mask is not None:
        x = x[mask]
    norm = (x.square() @ exact["embedding"].detach().square().T).sqrt().max()
    return 2.0**-16 * norm.item()


def compare(
    case: dict[str, Any],
    selected: bool,
    masked: bool,
    generator: torch.Generator,
    order: Tensor | None = None,
    noise: Tensor | None = None,
) -> Route:
    """Return the kernel's results and gradients, after comparing them."""
    device, dtype = case["x"].device, case["x"].dtype
    mask = (torch.rand(T, generator=generator) < 0.8).to(device) if masked else None
    if mask is not None:
        case["x"][~mask] = float("nan")  # padding may hold anything
    settings = (K, selected, mask, 0.7)
    exact = wide(case)
    mine, theirs = leaves(case), leaves(exact)
    found = fused_route(*case.values(), *settings, order, noise)
    wanted = route_reference(*exact.values(), *settings, noise)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    assert torch.equal(found.first, wanted.first)
    assert torch.equal(found.load.double(), wanted.load)
    # Gates move no more than affinities do; their sums over T tokens add that up.
    cuts = [lost_by_terms(exact, dtype, mask) * times for times in (1, 1, T)]
    for one, other, cut in zip(differentiable(found), differentiable(wanted), cuts, strict=True):
        # float32 accuracy: the products keep 24 bits, the sums of 70 features a few less.
        assert (one - other).abs().max() < 2e-6 * other.abs().max() + cut

    upstream = [torch.randn(z.shape, generator=generator).to(device) for z in differentiable(found)]
    grads = torch.autograd.grad(differentiable(found), mine, upstream)
    exact_grads = torch.autograd.grad(
        differentiable(wanted), theirs, [grad.double() for grad in upstream]
    )
    # A token's gradient has the token's dtype (truncated by the interpreter); those of parameters
    # are float32, from 3 terms of a product where the tokens have 16 bits.
    tolerances = [2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, 2e-5, 2e-5]
    for one, other, tolerance in zip(grads, exact_grads, tolerances, strict=False):
        assert (one - other).abs().max() < tolerance * other.abs().max()
    return found


def split(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return x * scale as two bf16 numbers, as the assembly of the Hopper kernels computes them."""
    high = (x.float() * scale).bfloat16()
    return high, (x.double() * scale.double() - high.double()).float().bfloat16()
