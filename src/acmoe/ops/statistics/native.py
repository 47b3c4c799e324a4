"""Cluster statistics in C: one call measures, scales, and adds to the pending means.

The two passes over the tokens of a small layer take less time than the calls of torch and numpy
that the kernel "cpu" makes.

T tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.native.library import (
    SERVED,
    functions,
    pointer,
    unsupported_ids,
    unsupported_size,
)
from acmoe.ops.native.library import unsupported as not_native
from acmoe.ops.statistics import cpu
from acmoe.ops.statistics.scale import ScaleOptions

MOST = 2**20  # numbers in the tokens, up to which one thread takes less time than torch's calls

Pending = tuple[Tensor, Tensor, int]  # arguments `mean_CX`, `count_C` and `least` of `add_batch`


def unsupported(x: Tensor, assignment: Tensor) -> str | None:
    """Return the reason why the C functions cannot read these tokens, or None."""
    reason = not_native(x) or unsupported_ids(assignment)
    return reason or unsupported_size(x.numel(), MOST, "numbers")


def measured_dispersion(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    *,
    measure: str,
    token_mask: None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    add_to: Pending | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the op `measure_dispersion`; arguments are those of `cpu.measured_dispersion`."""
    found = _measured(x_TD, cluster_T, num_clusters, measure, None, add_to)
    if found is None:
        return cpu.measured_dispersion(
            x_TD, cluster_T, num_clusters, measure=measure, out=out, add_to=add_to
        )
    spread_CD, count_C, _ = found
    for buffer, value in zip(out or (), (spread_CD, count_C), strict=False):
        buffer.copy_(value)
    return spread_CD, count_C


def measured_scale(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    add_to: Pending | None = None,
) -> Tensor:
    """Compute the op `measure_scale`; arguments are those of `cpu.measured_scale`."""
    found = _measured(x_TD, cluster_T, num_clusters, measure, options, add_to)
    if found is None:
        return cpu.measured_scale(
            *(x_TD, cluster_T, num_clusters, options), measure=measure, out=out, add_to=add_to
        )
    spread_CD, count_C, scale_CD = found
    for buffer, value in zip(out or (), (spread_CD, count_C), strict=False):
        buffer.copy_(value)
    return scale_CD


def _measured(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    measure: str,
    options: ScaleOptions | None,
    add_to: Pending | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return dispersion (C, D), count (C,) and, with options, the scale (C, D); None: not served.

    Then a token has no cluster, or a dispersion is not finite.
    """
    T, D = x_TD.shape
    spread_CD = x_TD.new_empty(num_clusters, D)
    count_C = x_TD.new_empty(num_clusters)
    mean_CD, total_C, least = add_to or (None, None, 0)
    if mean_CD is not None and not mean_CD.is_contiguous():
        return None
    floor, eps, min_tokens, scale_CD = 0.0, 0.0, 0, spread_CD
    if options is not None:
        floor, eps, min_tokens = options.floor, options.eps, options.min_tokens
        scale_CD = torch.empty_like(spread_CD)
    code = functions().statistics(
        *(x_TD.data_ptr(), cluster_T.data_ptr(), T, D, num_clusters),
        *(cpu.MEASURES.index(measure), spread_CD.data_ptr(), count_C.data_ptr()),
        *(pointer(mean_CD), pointer(total_C), least),
        *(None if options is None else scale_CD.data_ptr(), floor, eps, min_tokens),
    )
    if code != SERVED:
        return None
    for one in (mean_CD, total_C):  # autograd does not see what C writes
        if one is not None and not one.is_inference():
            torch.autograd.graph.increment_version(one)
    return spread_CD, count_C, scale_CD
