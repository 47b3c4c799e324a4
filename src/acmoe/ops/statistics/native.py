"""Cluster statistics in C: one call measures, scales, and adds to the pending means.

The two passes over the tokens of a small layer take less time than the calls of torch and numpy
that the kernel "cpu" makes.

T tokens, or B sets of T tokens; D features, C clusters.
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

_NO_RESULTS, _NO_SCALE = (None, None), (None, 0.0, 0.0, 0)
_MEASURES = {name: code for code, name in enumerate(cpu.MEASURES)}
Pointers = tuple[int | None, int | None]
Pending = tuple[Tensor, Tensor, int]  # arguments `mean_CX`, `count_C` and `least` of `add_batch`


def unsupported(
    x: Tensor, assignment: Tensor, measure: str, token_mask: Tensor | None
) -> str | None:
    """Return the reason why the C functions cannot measure these clusters, or None."""
    reason = not_native(x) or unsupported_ids(assignment)
    if reason is not None:
        return reason
    if measure not in _MEASURES:
        return f"measure={measure!r} has no kernel"
    if x.requires_grad and torch.is_grad_enabled():
        return "its kernel has no gradient"
    if token_mask is not None or x.dim() not in (2, 3) or assignment.shape != x.shape[:-1]:
        return "its kernel takes sets of tokens without a mask"
    return unsupported_size(x.numel(), MOST, "numbers")


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
    """Compute the op `measure_dispersion`; arguments are those of `cpu.measured_dispersion`.

    x may have several sets of tokens (B, T, D). Each is measured by itself.
    """
    if x_TD.dim() == 3:
        sets = [
            measured_dispersion(one, cluster, num_clusters, measure=measure)
            for one, cluster in zip(x_TD, cluster_T, strict=True)
        ]
        found = torch.stack([spread for spread, _ in sets]), torch.stack([n for _, n in sets])
        for buffer, value in zip(out or (), found, strict=False):
            buffer.copy_(value)
        return found
    spread_CD, count_C = x_TD.new_empty(num_clusters, x_TD.shape[1]), x_TD.new_empty(num_clusters)
    results = spread_CD.data_ptr(), count_C.data_ptr()
    if not _served(x_TD, cluster_T, num_clusters, measure, add_to, results, _NO_SCALE):
        return cpu.measured_dispersion(
            x_TD, cluster_T, num_clusters, measure=measure, out=out, add_to=add_to
        )
    for buffer, value in zip(out or (), (spread_CD, count_C), strict=False):
        buffer.copy_(value)
    return spread_CD, count_C


def add_dispersion(
    x_TD: Tensor, cluster_T: Tensor, num_clusters: int, *, measure: str, add_to: Pending
) -> None:
    """Add what `measured_dispersion` returns to the pending means."""
    if not _served(x_TD, cluster_T, num_clusters, measure, add_to, _NO_RESULTS, _NO_SCALE):
        cpu.measured_dispersion(x_TD, cluster_T, num_clusters, measure=measure, add_to=add_to)


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
    """Compute the op `measure_scale`; arguments are those of `cpu.measured_scale`.

    x may have several sets of tokens (B, T, D). Each is measured by itself.
    """
    if x_TD.dim() == 3:
        buffers = [None] * len(x_TD) if out is None else list(zip(*out, strict=True))
        return torch.stack(
            [
                measured_scale(one, cluster, num_clusters, options, measure=measure, out=buffer)
                for one, cluster, buffer in zip(x_TD, cluster_T, buffers, strict=True)
            ]
        )
    scale_CD = x_TD.new_empty(num_clusters, x_TD.shape[1])
    rule = scale_CD.data_ptr(), options.floor, options.eps, options.min_tokens
    results: Pointers = _NO_RESULTS
    if out is not None:
        spread_CD, count_C = torch.empty_like(scale_CD), x_TD.new_empty(num_clusters)
        results = spread_CD.data_ptr(), count_C.data_ptr()
    if not _served(x_TD, cluster_T, num_clusters, measure, add_to, results, rule):
        return cpu.measured_scale(
            *(x_TD, cluster_T, num_clusters, options), measure=measure, out=out, add_to=add_to
        )
    if out is not None:
        out[0].copy_(spread_CD)
        out[1].copy_(count_C)
    return scale_CD


def _served(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    measure: str,
    add_to: Pending | None,
    results: Pointers,
    rule: tuple[int | None, float, float, int],
) -> bool:
    """Write the results; return False if a token has no cluster, or a dispersion is not finite.

    results: memory of dispersion (C, D) and count (C,), or None. rule: memory of the scale (C, D),
    or None, and the options floor, eps and min_tokens.
    """
    T, D = x_TD.shape
    mean_CD, total_C, least = add_to or (None, None, 0)
    if mean_CD is not None and not mean_CD.is_contiguous():
        return False
    code = functions().statistics(
        *(x_TD.data_ptr(), cluster_T.data_ptr(), T, D, num_clusters, _MEASURES[measure], *results),
        *(pointer(mean_CD), pointer(total_C), least, *rule),
    )
    if code != SERVED:
        return False
    if mean_CD is not None and total_C is not None and not mean_CD.is_inference():
        torch.autograd.graph.increment_version((mean_CD, total_C))  # autograd sees no write of C
    return True
