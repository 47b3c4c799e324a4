"""From dispersion to the diagonal of M: weight a feature by how tightly its cluster holds it.

C clusters, D features, X any leading dimensions (none, or one set of clusters per sequence).
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.optimum import check_strength, optimal_weights

NORMALIZATIONS = ("cluster", "feature", "global")

# Reciprocals of anything smaller would overflow float64 when they are summed.
_LEAST = 1e-290


def cluster_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    normalize: str = "cluster",
    strength: float | Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """The diagonals of M (Definition 1), mean one: (C, D), or (B, C, D) for x of (B, L, D).

    normalize    cluster: each cluster's weights average one over features (the proof of Lemma 1);
                 feature: each feature's average one over clusters; global: all average one
    strength     None for the paper's 1/s, a number for lambda of Theorem 1
    The other arguments are those of `dispersion`. Always finite and positive; a cluster of fewer
    than two tokens, or whose tokens are all equal, has no preference and gets ones.

    >>> x = torch.tensor([[0.0, 0.0], [2.0, 6.0]])  # mad (1, 3), so 1/s = (1, 1/3), mean 2/3
    >>> cluster_scale(x, torch.tensor([0, 0]), 1)
    tensor([[1.5000, 0.5000]])
    """
    check_normalize(normalize)
    spread, count = dispersion_and_count(
        x, assignment, num_clusters, measure=measure, token_mask=token_mask
    )
    return scale_from_dispersion(spread, count, normalize=normalize, strength=strength)


def scale_from_dispersion(
    dispersion: Tensor,
    count: Tensor,
    *,
    normalize: str = "cluster",
    strength: float | Tensor | None = None,
    floor: float = 1e-3,
    eps: float = 0.0,
    clamp: float | None = None,
    min_tokens: int = 2,
) -> Tensor:
    """`cluster_scale` from statistics already in hand: dispersion (X, C, D) and count (X, C).

    floor        each s is at least this share of its cluster's mean s, so no feature takes all
    eps, clamp   1 / (s + eps), then at most `clamp` times the mean weight: the published code
    min_tokens   clusters below it get ones; 0 treats an empty cluster as one with s = 0
    """
    check_normalize(normalize)
    if strength is not None:
        check_strength(strength)
    # float64: reciprocals of tiny dispersions overflow float32 before they are normalised.
    s_XCD = dispersion.double()
    mean_XC1 = s_XCD.mean(-1, keepdim=True)
    informs_XC1 = informs(dispersion, count, eps=eps, min_tokens=min_tokens)[..., None]
    # Clusters that do not inform take part in nothing, so that their NaN cannot reach a gradient.
    s_XCD = torch.where(informs_XC1, torch.maximum(s_XCD, floor * mean_XC1) + eps, 1.0)
    s_XCD = s_XCD.clamp(min=_LEAST)

    if strength is None:
        weight_XCD = 1 / s_XCD
    else:
        weight_XCD = s_XCD.shape[-1] * optimal_weights(s_XCD, strength)
    if clamp is not None:
        highest = clamp * _mean(weight_XCD, informs_XC1, (-2, -1))
        weight_XCD = torch.minimum(weight_XCD, highest)
    return mean_one(weight_XCD, informs_XC1, normalize).to(dispersion.dtype)


def informs(dispersion: Tensor, count: Tensor, *, eps: float = 0.0, min_tokens: int = 2) -> Tensor:
    """(X, C) whether a cluster's scale comes from its tokens; if not, it is one."""
    mean_XC = dispersion.double().mean(-1)
    informs_XC = (count >= min_tokens) & torch.isfinite(mean_XC)
    return informs_XC & (mean_XC > 0) if eps == 0 else informs_XC


def mean_one(weight_XCD: Tensor, informs_XC1: Tensor, normalize: str) -> Tensor:
    """Weights over their mean, within float32's normal range; ones where none inform."""
    over = {"cluster": (-1,), "feature": (-2,), "global": (-2, -1)}[normalize]
    weight_XCD = weight_XCD / _mean(weight_XCD, informs_XC1, over)
    finite = torch.finfo(torch.float32)
    return torch.where(informs_XC1, weight_XCD, 1.0).clamp(finite.tiny, finite.max)


def _mean(weight_XCD: Tensor, informs_XC1: Tensor, over: tuple[int, ...]) -> Tensor:
    """Mean over features, clusters or both, of the clusters that inform."""
    if over == (-1,):
        return weight_XCD.mean(-1, keepdim=True)
    kept_XCD = weight_XCD * informs_XC1
    number = informs_XC1.expand_as(weight_XCD).sum(over, keepdim=True).clamp(min=1)
    # No cluster informs: any positive number does, since every row becomes ones.
    return kept_XCD.sum(over, keepdim=True) / number + (~informs_XC1).all(-2, keepdim=True)


def check_normalize(normalize: str) -> None:
    check(
        normalize in NORMALIZATIONS,
        f"normalize={normalize!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}",
    )
