"""The scale in two independent ways: as the library measures it, and as the paper defines it.

Every check takes the scale it judges from `library_scale` or `measured_scale`, both of which call
`acmoe.cluster_scale`, and what it expects from `exact_scale`. A wrong `cluster_scale` therefore
turns every check that depends on the scale red (tests/lab/theory/test_mutations.py).

T tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.statistics.scale import cluster_scale


def exact_scale(std_CD: Tensor, power: float = 1.0) -> Tensor:
    """Return 1/std^power with rows of mean one, (C, D): Definition 1 with the mean of Lemma 1."""
    weight_CD = std_CD.pow(-power)
    return weight_CD / weight_CD.mean(-1, keepdim=True)


def measured_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    strength: float | None = None,
) -> Tensor:
    """Return the library's scale of these tokens: (C, D), or (X, C, D) for tokens (X, T, D)."""
    return cluster_scale(x, assignment, num_clusters, measure=measure, strength=strength)


def library_scale(std_CD: Tensor, *, measure: str = "mad", strength: float | None = None) -> Tensor:
    """Return the library's scale (C, D) of clusters with exactly these standard deviations.

    A cluster of two tokens at +-std has the mean absolute deviations, and the standard deviations,
    std. Those of a Gaussian are proportional, and the scale has mean one: no sampling error.
    """
    cluster_C = torch.arange(len(std_CD))
    both_TD = torch.cat([std_CD, -std_CD])
    return measured_scale(
        both_TD, cluster_C.repeat(2), len(std_CD), measure=measure, strength=strength
    )
