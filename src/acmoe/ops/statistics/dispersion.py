"""Dispersion of each cluster's tokens along each feature (Definition 1 of the paper).

T tokens, or B sequences of L tokens; D features, C clusters.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.bounded import largest_values
from acmoe.ops.checks import check_count, check_range, check_tokens, host_may_read
from acmoe.ops.precision import without_autocast
from acmoe.ops.statistics import reference

_MEASURES: dict[str, Callable[[Tensor, reference.Clusters], Tensor]] = {
    name: getattr(reference, name) for name in reference.MEASURES
}


def dispersion(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
) -> Tensor:
    """Return the dispersion of each cluster and feature: (C, D), or (B, C, D) for x of (B, L, D).

    x            (T, D) hidden states; (B, L, D) gives every sequence statistics of its own
    assignment   (T,) or (B, L) cluster of each token, 0 to C-1; -1 for a token in none
    measure      mad | variance | std | gini | iqr
    token_mask   bool, False for padding: such a token changes nothing, whatever it contains

    The result is float32 (float64 for float64 input) and differentiable; an empty cluster gives
    zeros.

    >>> x = torch.tensor([[0.0, 5.0], [2.0, 5.0], [7.0, 7.0]])
    >>> dispersion(x, torch.tensor([0, 0, 1]), 2)
    tensor([[1., 0.],
            [0., 0.]])
    """
    spread, _ = dispersion_and_count(
        x, assignment, num_clusters, measure=measure, token_mask=token_mask
    )
    return spread


def dispersion_and_count(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `dispersion`, and the number of tokens in each cluster, float32: (C,) or (B, C).

    A token with NaN or inf makes the dispersion of its own cluster NaN, and of no other.
    """
    check_measure(measure)
    check_count(num_clusters, "num_clusters")
    check_tokens(x, assignment, token_mask)
    check_range(assignment, -1, num_clusters, "assignment")
    one_set = x.dim() == 2
    if one_set:
        x, assignment = x[None], assignment[None]
        token_mask = None if token_mask is None else token_mask[None]
    x_BLD, cluster_BL = exclude(x, assignment, num_clusters, token_mask)
    clusters = reference.Clusters.of(cluster_BL, num_clusters, x_BLD.dtype)
    count_BC = clusters.tokens[..., 0].float()
    x_BLD, non_finite_BC1 = _zero_non_finite(x_BLD, clusters)
    if x_BLD.shape[1] == 0:  # no tokens: the measures would read the first one
        spread_BCD = x_BLD.sum(1, keepdim=True).expand(-1, num_clusters, -1)
    else:
        with without_autocast(x_BLD):
            spread_BCD = _MEASURES[measure](x_BLD, clusters)
    if non_finite_BC1 is not None:
        spread_BCD = spread_BCD.masked_fill(non_finite_BC1, math.nan)
    return (spread_BCD[0], count_BC[0]) if one_set else (spread_BCD, count_BC)


def check_measure(measure: str) -> None:
    """Raise a UserError unless the measure is known."""
    check(
        measure in _MEASURES,
        f"measure={measure!r} is unknown; choose one of {', '.join(_MEASURES)}",
    )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 sums for bf16 and fp16 tokens: bf16 dispersions flip near-ties of the router."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exclude(
    x: Tensor, assignment: Tensor, num_clusters: int, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x in its accumulation dtype, and clusters; masked tokens get zeros and cluster C."""
    if token_mask is None and host_may_read(assignment) and assignment.min().item() >= 0:
        return x.to(accumulation_dtype(x.dtype)), assignment.long()
    outside = assignment < 0 if token_mask is None else (assignment < 0) | ~token_mask
    cluster = assignment.long().masked_fill(outside, num_clusters)
    # masked_fill instead of multiplying by 0: 0 * NaN is NaN, in the backward too.
    x = x.to(accumulation_dtype(x.dtype)).masked_fill(outside[..., None], 0.0)
    return x, cluster


def finite_tokens(x: Tensor) -> Tensor:
    """Return (...,) bool: the token x (..., D) holds neither NaN nor inf. Reads x once."""
    return largest_values(x).isfinite()


def _zero_non_finite(x_BLD: Tensor, clusters: reference.Clusters) -> tuple[Tensor, Tensor | None]:
    """Zero tokens with NaN or inf; return x and the (B, C, 1) mask of their clusters.

    The mask is None if there is no such token. In the GEMM with the one-hot matrix 0 * NaN would
    carry one such token into every cluster.
    """
    if host_may_read(x_BLD) and math.isfinite(x_BLD.detach().sum().item()):
        return x_BLD, None
    non_finite_BL1 = (x_BLD.detach() * 0).sum(-1, keepdim=True).isnan()
    number_BC1 = clusters.one_hot @ non_finite_BL1.to(x_BLD.dtype)
    return x_BLD.masked_fill(non_finite_BL1, 0.0), number_BC1 > 0
