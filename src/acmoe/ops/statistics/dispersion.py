"""How far the tokens of each cluster spread along each feature (Definition 1 of the paper).

T tokens, or B sequences of L tokens; D features, C clusters.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.checks import check_count, check_range, check_tokens
from acmoe.ops.precision import without_autocast
from acmoe.ops.statistics import reference

_MEASURES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
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
    """Spread of each cluster along each feature: (C, D), or (B, C, D) for x of (B, L, D).

    x            (T, D) hidden states; (B, L, D) gives every sequence statistics of its own
    assignment   (T,) or (B, L) cluster of each token, 0 to C-1; -1 for a token in none
    measure      mad | variance | std | gini | iqr
    token_mask   bool, False for padding: such a token changes nothing, whatever it contains

    float32 (float64 for float64 input) and differentiable; an empty cluster gives zeros.

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
    """`dispersion`, and the float32 number of tokens in each cluster: (C,) or (B, C).

    A token that holds NaN or inf makes its own cluster's dispersion NaN, and no other's.
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
    x_BLD, spoiled_BC = _quarantine(x_BLD, cluster_BL, num_clusters)
    count_BC = reference.cluster_count(cluster_BL, num_clusters)
    if x_BLD.shape[1] == 0:  # no tokens at all: empty sums, for a measure would read the first one
        spread_BCD = x_BLD.sum(1, keepdim=True).expand(-1, num_clusters, -1)
    else:
        with without_autocast(x_BLD):
            spread_BCD = _MEASURES[measure](x_BLD, cluster_BL, num_clusters)
    spread_BCD = spread_BCD.masked_fill(spoiled_BC[..., None], math.nan)
    return (spread_BCD[0], count_BC[0]) if one_set else (spread_BCD, count_BC)


def check_measure(measure: str) -> None:
    check(
        measure in _MEASURES,
        f"measure={measure!r} is unknown; choose one of {', '.join(_MEASURES)}",
    )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 sums for bf16 and float16 tokens: bf16 dispersions flip near-ties of the router."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exclude(
    x: Tensor, assignment: Tensor, num_clusters: int, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens that count, in their accumulation dtype; cluster C and zeros for those that do not."""
    outside = assignment < 0 if token_mask is None else (assignment < 0) | ~token_mask
    cluster = assignment.long().masked_fill(outside, num_clusters)
    # masked_fill, not a product with 0: 0 * NaN is NaN, in the backward pass too.
    x = x.to(accumulation_dtype(x.dtype)).masked_fill(outside[..., None], 0.0)
    return x, cluster


def _quarantine(x_BLD: Tensor, cluster_BL: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Zeros in place of tokens that hold NaN or inf, and the clusters (B, C) that have any.

    In a product with a one-hot matrix 0 * NaN would carry one bad token into every cluster.
    """
    bad_BL = (x_BLD.detach() * 0).sum(-1).isnan()
    spoiled_BC = reference.cluster_count(
        cluster_BL.masked_fill(~bad_BL, num_clusters), num_clusters
    )
    return x_BLD.masked_fill(bad_BL[..., None], 0.0), spoiled_BC > 0
