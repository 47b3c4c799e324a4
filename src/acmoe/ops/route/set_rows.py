"""The row of each token in the scales of many sets of tokens, such as sequences.

T tokens in B sets of equal size, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import eager, op


@op
def set_rows(cluster_T: Tensor, num_sets: int, num_clusters: int) -> Tensor:
    """Return the row b * C + c (T,) of a token of set b and cluster c; -1: it is in no cluster.

    >>> set_rows(torch.tensor([0, 2, -1, 1]), 2, 3)
    tensor([ 0,  2, -1,  4])
    """
    set_T = torch.arange(num_sets, device=cluster_T.device).repeat_interleave(
        cluster_T.shape[0] // max(num_sets, 1)
    )
    return (set_T * num_clusters + cluster_T).masked_fill(cluster_T < 0, -1)


def _unsupported(cluster_T: Tensor) -> str | None:
    if cluster_T.dtype != torch.int64:
        return f"its kernel takes int64 clusters, not {cluster_T.dtype}"
    if cluster_T.numel() == 0:
        return "there are no tokens"
    return triton_unsupported(cluster_T, any_dtype=True)


@set_rows.register("triton", unsupported=_unsupported, by_triton=True)
def _by_triton(cluster_T: Tensor, num_sets: int, num_clusters: int) -> Tensor:
    run = _launched if eager(cluster_T) else set_rows_op
    return run(cluster_T, num_sets, num_clusters)


def _launched(cluster_T: Tensor, num_sets: int, num_clusters: int) -> Tensor:
    from acmoe.ops.route.triton.set_rows import launch_set_rows

    return launch_set_rows(cluster_T, num_sets, num_clusters)


set_rows_op = torch.library.custom_op("acmoe::set_rows", _launched, mutates_args=())


@set_rows_op.register_fake
def _(cluster_T: Tensor, num_sets: int, num_clusters: int) -> Tensor:
    return torch.empty_like(cluster_T, memory_format=torch.contiguous_format)
