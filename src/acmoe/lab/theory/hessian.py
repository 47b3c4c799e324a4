"""The Hessian of a router's loss in one expert embedding, and its condition number.

Taken by automatic differentiation of the cross-entropy of the gate to the true cluster. Written
out it is the mean of g_i (1 - g_i) (M h)(M h)'.

T tokens, D features, C clusters, E experts (E = C), X independent draws.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.statistics.scale import cluster_scale


class Conditioning(NamedTuple):
    """Condition numbers over draws, and how far autograd and the written-out Hessian differ."""

    plain: Tensor  # (X,)
    adaptive: Tensor  # (X,)
    hessian_error: float
    frozen_gate_error: float  # of the proof's step: g_i (1 - g_i) replaced by its mean


def router_loss(
    embedding_D: Tensor, x_TD: Tensor, embeddings_ED: Tensor, cluster_T: Tensor, expert: Tensor
) -> Tensor:
    """Cross-entropy of the gate to the true cluster, as a function of one expert's embedding."""
    ours_E = torch.arange(len(embeddings_ED)) == expert
    affinity_TE = x_TD @ torch.where(ours_E[:, None], embedding_D, embeddings_ED).mT
    target_T = affinity_TE.gather(1, cluster_T[:, None])[:, 0]
    return (affinity_TE.logsumexp(-1) - target_T).mean()


def expert_hessians(
    x_XTD: Tensor, embeddings_XED: Tensor, cluster_XT: Tensor, expert_X: Tensor
) -> Tensor:
    """(X, D, D) Hessians of the router's loss in the embedding of expert_X, by autograd."""
    own_XD = embeddings_XED[torch.arange(len(expert_X)), expert_X]
    # Reverse over reverse: forward mode loads torch.jit, which warns that it is deprecated.
    hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(router_loss)))
    result: Tensor = hessian(own_XD, x_XTD, embeddings_XED, cluster_XT, expert_X)
    return result


def written_out(
    x_XTD: Tensor, embeddings_XED: Tensor, expert_X: Tensor, *, frozen_gate: bool
) -> Tensor:
    """Mean of g_i (1 - g_i) x x'; with the gate frozen, the proof's mean(B_i) mean(x x')."""
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
    """Largest Frobenius distance over the draws, in units of the Hessian's norm."""
    apart_X = torch.linalg.matrix_norm(guess_XDD - hessian_XDD)
    return float((apart_X / torch.linalg.matrix_norm(hessian_XDD)).max())


def conditioning(
    x_XTD: Tensor, cluster_XT: Tensor, embeddings_XED: Tensor, *, measure: str = "mad"
) -> Conditioning:
    """Plain against AC for one expert a draw, each token scaled by its own cluster."""
    count = embeddings_XED.shape[1]
    expert_X = torch.arange(len(x_XTD)) % count
    scale_XCD = cluster_scale(x_XTD, cluster_XT, count, measure=measure)
    own_XTD = scale_XCD.gather(1, cluster_XT[..., None].expand_as(x_XTD))
    numbers, error, frozen = [], 0.0, 0.0
    for y_XTD in (x_XTD, own_XTD * x_XTD):
        hessian_XDD = expert_hessians(y_XTD, embeddings_XED, cluster_XT, expert_X)
        exact_XDD, proof_XDD = (
            written_out(y_XTD, embeddings_XED, expert_X, frozen_gate=flag) for flag in (False, True)
        )
        error = max(error, _relative_error(exact_XDD, hessian_XDD))
        frozen = max(frozen, _relative_error(proof_XDD, hessian_XDD))
        numbers.append(condition_number(hessian_XDD))
    plain_X, adaptive_X = numbers
    return Conditioning(plain_X, adaptive_X, error, frozen)
