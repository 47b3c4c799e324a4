"""Tokens, experts and clusters for the fused router, and how exact it can be on them.

T = 37 tokens, D = 70 features, E = 5 experts, C = 7 clusters, K = 3 experts per token: nothing is a
multiple of a block.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.ops.route.op import Route

T, D, E, C, K = 37, 70, 5, 7, 3


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
    """What 4 terms for 16-bit tokens may cost an affinity (ops/device/dot.py).

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
