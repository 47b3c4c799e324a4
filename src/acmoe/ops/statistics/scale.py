"""Compute the scale, the diagonal of M (C, D), from the dispersion s: weights 1/s, normalised.

A cluster is called informative if its scale comes from its tokens; any other cluster gets ones.

C clusters, D features, X any leading dimensions (none, or one set of clusters per sequence).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check, check_positive
from acmoe.ops.precision import wide_dtype
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.optimum import check_strength, optimal_weights

NORMALIZATIONS = ("cluster", "feature", "global")
_OVER = {"cluster": (-1,), "feature": (-2,), "global": (-2, -1)}  # dimensions of (X, C, D)

# Sums of reciprocals of anything smaller would overflow float64. In float32 it is the least normal
# number, and weights are relative to the greatest that they are averaged with.
_MIN_DISPERSION = {torch.float64: 1e-290, torch.float32: torch.finfo(torch.float32).tiny}

ScaleTransform = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    counted: Tensor | None = None,
    mean_before_clamp: bool = False,
) -> Tensor:
    """Compute `cluster_scale` from given statistics: dispersion (X, C, D) and count (X, C).

    floor        raise each s to at least this share of its cluster's mean s: no weight dominates
    eps, clamp   1 / (s + eps), then at most `clamp` times the mean weight, as in the published code
    min_tokens   clusters below it get ones; 0 treats an empty cluster as one with s = 0
    counted      (X, C) bool, False for clusters that get ones and enter no mean; None: all True
    mean_before_clamp   divide by the mean that the weights have before the clamp
    """
    check_normalize(normalize)
    if strength is not None:
        check_strength(strength)
    # float64 if the device has it: reciprocals of tiny dispersions overflow float32 before they are
    # normalised. Without it weights are computed relative to their greatest, with relative errors
    # below 2e-6 (tests/ops/test_narrow_scale.py).
    wide = wide_dtype(dispersion.device)
    s_XCD = dispersion.to(wide)
    mean_XC1 = s_XCD.mean(-1, keepdim=True)
    informative_XC1 = _informs(mean_XC1, count[..., None], eps, min_tokens)
    if counted is not None:
        informative_XC1 = informative_XC1 & counted[..., None]
    # Uninformative clusters get the constant 1, so that their NaN cannot reach a gradient.
    s_XCD = torch.maximum(s_XCD, floor * mean_XC1)
    s_XCD = torch.where(informative_XC1, s_XCD + eps if eps else s_XCD, 1.0)
    s_XCD = s_XCD.clamp(min=_MIN_DISPERSION[wide])
    weight_XCD, clamped_XCD = _weights(s_XCD, informative_XC1, normalize, strength, clamp)
    averaged_XCD = weight_XCD if mean_before_clamp else clamped_XCD
    scale_XCD = mean_one(clamped_XCD, informative_XC1, normalize, averaged_XCD)
    return scale_XCD.to(dispersion.dtype)


class ScaleOptions(NamedTuple):
    """The options of `scale_from_dispersion`, and an optional function applied to the scale."""

    normalize: str
    strength: float | Tensor | None
    floor: float
    eps: float
    clamp: float | None
    min_tokens: int
    # (scale, dispersion, count) -> scale; None: the identity
    transform: ScaleTransform | None = None
    # all, or chosen: means over clusters end at the last chosen one (`AdaptiveConfig.mean_over`)
    mean_over: str = "all"
    # (C,) not 0 for clusters that a token chose; None: those that hold a token
    chosen: Tensor | None = None
    mean_before_clamp: bool = False

    def is_separable(self) -> bool:
        """Return True if a cluster's scale is 1/s over its mean, independent of other clusters.

        It is no property: Dynamo of torch 2.10 cannot trace one of a tuple that holds a symbol.
        """
        plain = self.strength is None and self.clamp is None and self.normalize == "cluster"
        return plain and self.transform is None

    def counted(self, count: Tensor) -> Tensor | None:
        """Return the mask of the clusters in means over clusters, or None for all of them."""
        if self.mean_over == "all":
            return None
        return up_to_last(count if self.chosen is None else self.chosen)

    def transformed(self, scale: Tensor, spread: Tensor, count: Tensor) -> Tensor:
        """Return transform(scale, spread, count), or the scale without a transform."""
        return scale if self.transform is None else self.transform(scale, spread, count)


def scale_of(spread: Tensor, count: Tensor, options: ScaleOptions) -> Tensor:
    """Return the scale (X, C, D) computed from a dispersion (X, C, D) and a count (X, C)."""
    scale = scale_from_dispersion(
        spread,
        count,
        normalize=options.normalize,
        strength=options.strength,
        floor=options.floor,
        eps=options.eps,
        clamp=options.clamp,
        min_tokens=options.min_tokens,
        counted=options.counted(count),
        mean_before_clamp=options.mean_before_clamp,
    )
    return options.transformed(scale, spread, count)


def _weights(
    s_XCD: Tensor,
    informative_XC1: Tensor,
    normalize: str,
    strength: float | Tensor | None,
    clamp: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the weights, 1/s or those of `strength`, up to a factor: before and after the clamp.

    Without a clamp the two are the same tensor.
    """
    relative = strength is None and s_XCD.dtype == torch.float32
    if strength is not None:
        weight_XCD = s_XCD.shape[-1] * optimal_weights(s_XCD, strength)
    elif relative:
        weight_XCD = _relative_weights(s_XCD, informative_XC1, _OVER[normalize], None)
    else:
        weight_XCD = s_XCD.reciprocal()
    if clamp is None:
        return weight_XCD, weight_XCD
    if relative:
        return weight_XCD, _relative_weights(s_XCD, informative_XC1, _OVER[normalize], clamp)
    highest = clamp * _mean(weight_XCD, informative_XC1, (-2, -1))
    return weight_XCD, torch.minimum(weight_XCD, highest)


def _relative_weights(
    s_XCD: Tensor, informative_XC1: Tensor, over: tuple[int, ...], clamp: float | None
) -> Tensor:
    """Return 1/s times the least s of the informative clusters along `over`, at most `clamp`.

    The weights are at most 1, and the greatest of those that are averaged together is 1, so neither
    they nor their sums overflow. `mean_one` removes the factor again.
    """
    weight_XCD = _least(s_XCD, informative_XC1, over) / s_XCD
    if clamp is None:
        return weight_XCD
    # The bound is `clamp` times the mean of all weights, so that all must have the same factor.
    least_X11 = _least(s_XCD, informative_XC1, (-2, -1))
    highest_X11 = clamp * _mean(least_X11 / s_XCD, informative_XC1, (-2, -1))
    return torch.minimum(
        weight_XCD, highest_X11 * (_least(s_XCD, informative_XC1, over) / least_X11)
    )


def _least(s_XCD: Tensor, informative_XC1: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the least s of the informative clusters along `over`, without gradient; 1 if none."""
    least = s_XCD.detach().masked_fill(~informative_XC1, math.inf).amin(over, keepdim=True)
    return torch.where(least.isfinite(), least, 1.0)


def informs(dispersion: Tensor, count: Tensor, *, eps: float = 0.0, min_tokens: int = 2) -> Tensor:
    """Return the (X, C) mask of informative clusters: enough tokens, and a finite, positive mean s.

    With eps > 0 a mean s of 0 is informative too.
    """
    mean_XC = dispersion.to(wide_dtype(dispersion.device)).mean(-1)
    return _informs(mean_XC, count, eps, min_tokens)


def _informs(mean: Tensor, count: Tensor, eps: float, min_tokens: int) -> Tensor:
    positive = mean > 0 if eps == 0 else mean >= 0
    return (count >= min_tokens) & positive & (mean < math.inf)  # NaN is neither


def up_to_last(chosen: Tensor) -> Tensor:
    """Return the (X, C) mask of the clusters up to the last that is not 0 in `chosen` (X, C).

    The published code takes means over these clusters: it sizes its tables by the highest id.

    >>> up_to_last(torch.tensor([0, 3, 0, 1, 0]))
    tensor([ True,  True,  True,  True, False])
    """
    number_C = torch.arange(1, chosen.shape[-1] + 1, device=chosen.device)
    last_X1 = torch.where(chosen > 0, number_C, 0).amax(-1, keepdim=True)
    return number_C <= last_X1


def mean_one(
    weight_XCD: Tensor,
    informative_XC1: Tensor,
    normalize: str,
    averaged_XCD: Tensor | None = None,
) -> Tensor:
    """Divide weights by their mean and clamp to float32's normal range; ones if not informative.

    averaged_XCD: the weights to take the mean of; None: the weights themselves.
    """
    averaged_XCD = weight_XCD if averaged_XCD is None else averaged_XCD
    weight_XCD = weight_XCD / _mean(averaged_XCD, informative_XC1, _OVER[normalize])
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
