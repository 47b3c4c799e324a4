"""Compute the Hessian of a router's loss in one expert embedding, and its condition number.

The loss, which the paper does not name, is the cross-entropy between the gate and the true cluster.
The Hessian comes from automatic differentiation; in closed form it is the mean of
g_i (1 - g_i) (M h)(M h)'.

T tokens, D features, C clusters, E experts (E = C), X independent draws.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.lab.theory.scale import measured_scale


class Conditioning(NamedTuple):
    """Condition numbers of all draws, and relative errors of two formulas for the Hessian."""

    plain: Tensor  # (X,)
    adaptive: Tensor  # (X,)
    hessian_error: float  # closed form, compared with autograd
    # the proof's formula, which takes the mean of g_i (1 - g_i), compared with autograd
    frozen_gate_error: float


def router_loss(
    embedding_D: Tensor,
    x_TD: Tensor,
    embeddings_ED: Tensor,
    cluster_T: Tensor,
    expert: Tensor,
    weight_T: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of the gate with the true cluster: a mean, or a weighted sum.

    It is a function of `embedding_D`, which replaces the row `expert` of `embeddings_ED`.
    """
    ours_E = torch.arange(len(embeddings_ED)) == expert
    affinity_TE = x_TD @ torch.where(ours_E[:, None], embedding_D, embeddings_ED).mT
    target_T = affinity_TE.gather(1, cluster_T[:, None])[:, 0]
    loss_T = affinity_TE.logsumexp(-1) - target_T
    return loss_T.mean() if weight_T is None else (weight_T * loss_T).sum()


def expert_hessians(
    x_XTD: Tensor,
    embeddings_XED: Tensor,
    cluster_XT: Tensor,
    expert_X: Tensor,
    weight_XT: Tensor | None = None,
) -> Tensor:
    """Compute the Hessians of the router's loss in the embedding of expert_X, (X, D, D)."""
    own_XD = embeddings_XED[torch.arange(len(expert_X)), expert_X]
    # jacrev, not jacfwd: forward mode loads torch.jit, which warns that it is deprecated.
    hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(router_loss)))
    weights = () if weight_XT is None else (weight_XT,)
    result: Tensor = hessian(own_XD, x_XTD, embeddings_XED, cluster_XT, expert_X, *weights)
    return result


def closed_form(
    x_XTD: Tensor, embeddings_XED: Tensor, expert_X: Tensor, *, frozen_gate: bool
) -> Tensor:
    """Return the mean of g_i (1 - g_i) x x', (X, D, D).

    With `frozen_gate`, return the proof's mean(B_i) mean(x x') instead, B_i = g_i (1 - g_i).
    """
    gate_XTE = (x_XTD @ embeddings_XED.mT).softmax(-1)
    gate_XT = gate_XTE[torch.arange(len(expert_X)), :, expert_X]
    slope_XT = gate_XT * (1 - gate_XT)
    if frozen_gate:
        slope_XT = slope_XT.mean(-1, keepdim=True).expand_as(slope_XT)
    return (slope_XT[..., None] * x_XTD).mT @ x_XTD / x_XTD.shape[1]


def condition_number(hessian: Tensor) -> Tensor:
    eigenvalues: Tensor = torch.linalg.eigvalsh(hessian)
    return eigenvalues[..., -1] / eigenvalues[..., 0]


def _relative_error(guess_XDD: Tensor, hessian_XDD: Tensor) -> float:
    """Return the largest relative error over the draws, in the Frobenius norm."""
    distance_X = torch.linalg.matrix_norm(guess_XDD - hessian_XDD)
    return float((distance_X / torch.linalg.matrix_norm(hessian_XDD)).max())


def conditioning(
    x_XTD: Tensor, cluster_XT: Tensor, embeddings_XED: Tensor, *, measure: str = "mad"
) -> Conditioning:
    """Compare plain and AC conditioning for one expert per draw.

    AC scales each token by the M of its true cluster.
    """
    count = embeddings_XED.shape[1]
    expert_X = torch.arange(len(x_XTD)) % count
    scale_XCD = measured_scale(x_XTD, cluster_XT, count, measure=measure)
    own_XTD = scale_XCD.gather(1, cluster_XT[..., None].expand_as(x_XTD))
    numbers, error, frozen = [], 0.0, 0.0
    for y_XTD in (x_XTD, own_XTD * x_XTD):
        hessian_XDD = expert_hessians(y_XTD, embeddings_XED, cluster_XT, expert_X)
        exact_XDD, proof_XDD = (
            closed_form(y_XTD, embeddings_XED, expert_X, frozen_gate=flag) for flag in (False, True)
        )
        error = max(error, _relative_error(exact_XDD, hessian_XDD))
        frozen = max(frozen, _relative_error(proof_XDD, hessian_XDD))
        numbers.append(condition_number(hessian_XDD))
    plain_X, adaptive_X = numbers
    return Conditioning(plain_X, adaptive_X, error, frozen)
