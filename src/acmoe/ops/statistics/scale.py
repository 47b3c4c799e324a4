"""From dispersion s to the scale, the diagonal of M (C, D): a feature's weight is 1/s, normalised.

A cluster is called informative if its scale comes from its tokens; any other cluster gets ones.

C clusters, D features, X any leading dimensions (none, or one set of clusters per sequence).
"""

import torch
from torch import Tensor

from acmoe.errors import check, check_positive
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.optimum import check_strength, optimal_weights

NORMALIZATIONS = ("cluster", "feature", "global")

# Sums of reciprocals of anything smaller would overflow float64.
_MIN_DISPERSION = 1e-290


def cluster_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    normalize: str = "cluster",
    strength: float | Tensor | None = None,
    floor: float = 1e-3,
    min_tokens: int = 2,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Return the diagonals of M, mean one: (C, D), or (B, C, D) for x of (B, L, D).

    This is Definition 1 of the paper, w = 1/s, with two rules that the definition lacks: `floor`
    and `min_tokens`, which keep w finite.

    normalize    cluster: each cluster's weights average one over features (the proof of Lemma 1);
                 feature: each feature's average one over clusters; global: all average one
    strength     None for the paper's 1/s, a number for lambda of Theorem 1
    floor        raise each s to at least this share of its cluster's mean s: a feature on which all
                 tokens agree would get all the weight. Positive; with 1e-3 one feature weighs at
                 most 1,000 times what a feature of mean s does.
    min_tokens   a cluster with fewer tokens gets ones: one token has no dispersion. At least 1.
    The other arguments are those of `dispersion`. The scale is finite and positive; a cluster whose
    tokens are all equal, or that holds a token with NaN or inf, gets ones.

    >>> x = torch.tensor([[0.0, 0.0], [2.0, 6.0]])  # mad (1, 3), so 1/s = (1, 1/3), mean 2/3
    >>> cluster_scale(x, torch.tensor([0, 0]), 1)
    tensor([[1.5000, 0.5000]])
    """
    check_normalize(normalize)
    check_positive(floor, "floor")
    check(min_tokens >= 1, f"min_tokens={min_tokens}; it must be at least 1")
    spread, count = dispersion_and_count(
        x, assignment, num_clusters, measure=measure, token_mask=token_mask
    )
    return scale_from_dispersion(
        *(spread, count),
        normalize=normalize,
        strength=strength,
        floor=floor,
        min_tokens=min_tokens,
    )


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
    """Compute `cluster_scale` from given statistics: dispersion (X, C, D) and count (X, C).

    floor        raise each s to at least this share of its cluster's mean s: no weight dominates
    eps, clamp   1 / (s + eps), then at most `clamp` times the mean weight, as in the published code
    min_tokens   clusters below it get ones; 0 treats an empty cluster as one with s = 0
    """
    check_normalize(normalize)
    if strength is not None:
        check_strength(strength)
    # float64: reciprocals of tiny dispersions overflow float32 before they are normalised.
    s_XCD = dispersion.double()
    mean_XC1 = s_XCD.mean(-1, keepdim=True)
    informative_XC1 = informs(dispersion, count, eps=eps, min_tokens=min_tokens)[..., None]
    # Uninformative clusters get the constant 1, so that their NaN cannot reach a gradient.
    s_XCD = torch.where(informative_XC1, torch.maximum(s_XCD, floor * mean_XC1) + eps, 1.0)
    s_XCD = s_XCD.clamp(min=_MIN_DISPERSION)

    if strength is None:
        weight_XCD = 1 / s_XCD
    else:
        weight_XCD = s_XCD.shape[-1] * optimal_weights(s_XCD, strength)
    if clamp is not None:
        highest = clamp * _mean(weight_XCD, informative_XC1, (-2, -1))
        weight_XCD = torch.minimum(weight_XCD, highest)
    return mean_one(weight_XCD, informative_XC1, normalize).to(dispersion.dtype)


def informs(dispersion: Tensor, count: Tensor, *, eps: float = 0.0, min_tokens: int = 2) -> Tensor:
    """Return the (X, C) mask of informative clusters: enough tokens, and a finite, positive mean s.

    With eps > 0 a mean s of 0 is informative too.
    """
    mean_XC = dispersion.double().mean(-1)
    informative_XC = (count >= min_tokens) & torch.isfinite(mean_XC)
    return informative_XC & (mean_XC > 0) if eps == 0 else informative_XC


def mean_one(weight_XCD: Tensor, informative_XC1: Tensor, normalize: str) -> Tensor:
    """Divide weights by their mean and clamp to float32's normal range; ones if not informative."""
    over = {"cluster": (-1,), "feature": (-2,), "global": (-2, -1)}[normalize]
    weight_XCD = weight_XCD / _mean(weight_XCD, informative_XC1, over)
    finite = torch.finfo(torch.float32)
    return torch.where(informative_XC1, weight_XCD, 1.0).clamp(finite.tiny, finite.max)


def _mean(weight_XCD: Tensor, informative_XC1: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the mean over features, clusters or both, of the informative clusters."""
    if over == (-1,):
        return weight_XCD.mean(-1, keepdim=True)
    informative_XCD = weight_XCD * informative_XC1
    count = informative_XC1.expand_as(weight_XCD).sum(over, keepdim=True).clamp(min=1)
    # If no cluster is informative, any positive mean will do: every row becomes ones.
    return informative_XCD.sum(over, keepdim=True) / count + (~informative_XC1).all(
        -2, keepdim=True
    )


def check_normalize(normalize: str) -> None:
    """Raise a UserError unless the normalisation is known."""
    check(
        normalize in NORMALIZATIONS,
        f"normalize={normalize!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}",
    )
