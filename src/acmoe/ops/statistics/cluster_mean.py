"""Mean of a vector over the tokens of each cluster.

T tokens, X features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.statistics import reference
from acmoe.ops.statistics.dispersion import exclude


def cluster_mean(
    value: Tensor, assignment: Tensor, num_clusters: int, token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean (C, X) of each cluster's values, 0 where it has none, and their number (C,).

    value        (T, X)
    assignment   (T,) 0 to C-1; -1 for a token in no cluster
    A token that holds NaN or inf is left out.

    >>> cluster_mean(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, -1]), 2)
    (tensor([[2.],
            [0.]]), tensor([2., 0.]))
    """
    keep_T = torch.isfinite(value).all(-1)
    if token_mask is not None:
        keep_T = keep_T & token_mask
    value_TX, cluster_T = exclude(value, assignment, num_clusters, keep_T)
    clusters = reference.Clusters.of(cluster_T[None], num_clusters, value_TX.dtype)
    mean_CX = reference.mean_per_cluster(value_TX[None], clusters)[0]
    return mean_CX, clusters.tokens[0, :, 0].float()
