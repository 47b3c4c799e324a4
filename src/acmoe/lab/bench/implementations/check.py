"""Check that an implementation computes the layer correctly before it is timed.

The reference is a loop over experts in float64. It covers some of the tokens only, which is enough
because with a plain router no token's output or gradient depends on another token.

T tokens, S compared tokens, D features, E experts, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.lab.bench.implementations.plain import activate
from acmoe.lab.bench.implementations.weights import Weights
from acmoe.lab.bench.shapes import Shape

# Relative errors that rounding can cause; a wrong gate, activation or bias exceeds them.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-3}
_COMPARED = 256


class WrongResultError(Exception):
    """An implementation computes something else, so that its time would mean nothing."""


class Reference(NamedTuple):
    """The correct output and gradient for some of the tokens."""

    token: Tensor  # (S,) indices of these tokens
    y: Tensor  # (S, D) output in float64
    # (S, D) gradient of sum(y * cotangent) with respect to the tokens, in float64; None where only
    # the forward pass is measured
    grad: Tensor | None


class Errors(NamedTuple):
    """Relative errors, ‖found - reference‖ / ‖reference‖."""

    forward: float
    gradient: float | None  # None: no backward was run

    def require(self, tolerance: float) -> None:
        """Raise unless every error is below `tolerance`. NaN raises too."""
        found = {"forward": self.forward, "gradient": self.gradient}
        known = {name: error for name, error in found.items() if error is not None}
        if not all(error < tolerance for error in known.values()):
            told = ", ".join(f"{error:.1e} {name}" for name, error in known.items())
            raise WrongResultError(f"relative error {told}; {tolerance:.0e} is allowed")


def reference(
    x_TD: Tensor,
    cotangent_TD: Tensor,
    weights: Weights,
    shape: Shape,
    *,
    scale_TD: Tensor | None = None,
    forward: bool = False,
) -> Reference:
    """Compute output and gradient in float64. An adaptive router multiplies x by `scale_TD`.

    forward: compute the output alone.
    """
    x_TD = x_TD.detach()
    routed_TD = x_TD.double() if scale_TD is None else x_TD.double() * scale_TD.double()
    token_S = _clear_tokens(routed_TD @ weights.embedding.detach().double().T, shape.top_k)
    scale_SD = None if scale_TD is None else scale_TD[token_S].double()
    x_SD = x_TD[token_S].double().requires_grad_(not forward)
    y_SD = _layer(x_SD, weights, shape, scale_SD)
    if forward:
        return Reference(token_S, y_SD, None)
    (grad_SD,) = torch.autograd.grad(y_SD, x_SD, cotangent_TD[token_S].double())
    return Reference(token_S, y_SD.detach(), grad_SD)


def _clear_tokens(affinity_TE: Tensor, top_k: int) -> Tensor:
    """Return the tokens with the widest gaps after the k-th affinity.

    Rounding cannot send these to other experts.
    """
    sorted_TE = affinity_TE.sort(-1, descending=True).values
    if top_k == sorted_TE.shape[1]:
        return torch.arange(min(_COMPARED, len(sorted_TE)), device=sorted_TE.device)
    gap_T = sorted_TE[:, top_k - 1] - sorted_TE[:, top_k]
    return gap_T.topk(min(_COMPARED, (len(gap_T) + 1) // 2)).indices  # at least one


def _layer(x_SD: Tensor, weights: Weights, shape: Shape, scale_SD: Tensor | None) -> Tensor:
    routed_SD = x_SD if scale_SD is None else x_SD * scale_SD
    affinity_SE = routed_SD @ weights.embedding.detach().double().T
    best_SK, expert_ids_SK = affinity_SE.topk(shape.top_k, dim=-1)
    every_SE = affinity_SE.exp() / affinity_SE.exp().sum(-1, keepdim=True)
    gate_SK = every_SE.gather(1, expert_ids_SK)
    if shape.top_k > 1:
        gate_SK = best_SK.exp() / best_SK.exp().sum(-1, keepdim=True)
    y_SD = torch.zeros_like(x_SD)
    for expert in range(shape.num_experts):
        row, choice = (expert_ids_SK == expert).nonzero(as_tuple=True)
        if len(row) == 0:  # few tokens choose few of the experts
            continue
        own_D = _expert(x_SD[row], weights, expert, shape.activation)
        y_SD = y_SD.index_add(0, row, gate_SK[row, choice, None] * own_D)
    return y_SD


def _expert(x: Tensor, weights: Weights, expert: int, activation: str) -> Tensor:
    h = x @ weights.up[expert].detach().double().T
    if weights.up_bias is not None:
        h = h + weights.up_bias[expert].detach().double()
    y = activate(h, activation) @ weights.down[expert].detach().double().T
    return y if weights.down_bias is None else y + weights.down_bias[expert].detach().double()


def compare(y_TD: Tensor, grad_TD: Tensor | None, wanted: Reference) -> Errors:
    """Return the errors of an output, and of a gradient if there is one."""
    gradient = None
    if grad_TD is not None:
        assert wanted.grad is not None
        gradient = _relative(grad_TD[wanted.token], wanted.grad)
    return Errors(_relative(y_TD[wanted.token], wanted.y), gradient)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted).norm() / wanted.norm())
