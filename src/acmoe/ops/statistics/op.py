"""Cluster statistics as ops: dispersion, and the scale computed from it.

T tokens, D features, C clusters, X any leading dimensions.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import eager, op
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics import cpu, native
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.dispersion_op import KERNEL_MEASURES, fused_dispersion
from acmoe.ops.statistics.scale import ScaleOptions, scale_of
from acmoe.ops.statistics.scale_op import (
    SCALE_MEASURES,
    ScaleSettings,
    constant_dispersion,
    fused_cluster_scale,
)
from acmoe.ops.statistics.sorted_op import sorted_cluster_scale, sorted_dispersion


@op
def measure_dispersion(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dispersion (X, C, D) and count (X, C) of x (X, T, D); see `dispersion_and_count`.

    Args:
        order: the packed `TokenOrder` of `assignment` (`RoutingState.order`), where masked tokens
            are in no cluster, or None. Kernels read it, this definition does not.
        out: float32 buffers that also receive the two results, detached.
    """
    found = dispersion_and_count(
        x, assignment, num_clusters, measure=measure, token_mask=token_mask
    )
    return _written(found, out)


def _dispersion_unsupported(x: Tensor, measure: str) -> str | None:
    if x.numel() == 0:
        return "there are no tokens"
    if measure not in KERNEL_MEASURES:
        return f"measure={measure!r} has no kernel"
    return triton_unsupported(x)


@measure_dispersion.register("triton", unsupported=_dispersion_unsupported, by_triton=True)
def _dispersion_triton(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    sorted_tokens = _unpacked(order, num_clusters)
    if measure in SCALE_MEASURES and not records_gradient(x):
        if sorted_tokens is not None:
            return sorted_dispersion(x, sorted_tokens, measure=measure, into=out)
        if eager(x, assignment, token_mask):
            return constant_dispersion(
                *(x, assignment, num_clusters), measure=measure, token_mask=token_mask, into=out
            )
    found = fused_dispersion(x, assignment, num_clusters, measure=measure, token_mask=token_mask)
    return _written(found, out)


def _dispersion_not_on_cpu(
    x: Tensor, assignment: Tensor, measure: str, token_mask: Tensor | None
) -> str | None:
    if measure not in cpu.MEASURES:
        return f"measure={measure!r} has no kernel"
    if records_gradient(x):
        return "its kernel has no gradient"
    if token_mask is not None or x.dim() != 2 or assignment.shape != x.shape[:1]:
        return "its kernel takes one set of tokens without a mask"
    if assignment.dtype != torch.int64:
        return f"its kernel takes int64 clusters, not {assignment.dtype}"
    return cpu.unsupported(x)


measure_dispersion.register("native", unsupported=native.unsupported)(native.measured_dispersion)
measure_dispersion.register("cpu", unsupported=_dispersion_not_on_cpu)(cpu.measured_dispersion)


@op
def measure_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the scale (X, C, D) of the tokens' clusters, in newly allocated memory.

    `order` and `out` are those of `measure_dispersion`.
    """
    spread, count = measure_dispersion(
        x,
        assignment,
        num_clusters,
        measure=measure,
        token_mask=token_mask,
        order=order,
        out=out,
    )
    return scale_of(spread, count, options)


def _scale_unsupported(x: Tensor, options: ScaleOptions, measure: str) -> str | None:
    if x.numel() == 0:
        return "there are no tokens"
    if measure not in SCALE_MEASURES:
        return f"measure={measure!r} has no kernel"
    if options.strength is not None:
        return "its kernel takes 1/s, not the optimum of a given strength"
    if options.mean_over != "all":
        return "its kernel takes means over all clusters, not up to the last chosen one"
    if options.mean_before_clamp and options.clamp is not None:
        return "its kernel takes means of clamped weights"
    if records_gradient(x):
        return "its kernel has no gradient"
    return triton_unsupported(x)


@measure_scale.register("triton", unsupported=_scale_unsupported, by_triton=True)
def _scale_triton(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    settings = ScaleSettings.of(measure, options)
    sorted_tokens = _unpacked(order, num_clusters)
    if sorted_tokens is not None:
        found = sorted_cluster_scale(x, sorted_tokens, settings, into=out)
    else:
        found = fused_cluster_scale(
            x, assignment, num_clusters, settings, token_mask=token_mask, into=out
        )
    return options.transformed(*found)


NOT_SEPARABLE = "its kernel scales each cluster by itself; these options compare clusters"


def _scale_not_native(
    x: Tensor, assignment: Tensor, options: ScaleOptions, measure: str, token_mask: Tensor | None
) -> str | None:
    if not options.is_separable() or options.mean_over != "all":
        return NOT_SEPARABLE
    return native.unsupported(x, assignment, measure, token_mask)


def _scale_not_on_cpu(
    x: Tensor, assignment: Tensor, options: ScaleOptions, measure: str, token_mask: Tensor | None
) -> str | None:
    if not options.is_separable() or options.mean_over != "all":
        return NOT_SEPARABLE
    return _dispersion_not_on_cpu(x, assignment, measure, token_mask)


measure_scale.register("native", unsupported=_scale_not_native)(native.measured_scale)
measure_scale.register("cpu", unsupported=_scale_not_on_cpu)(cpu.measured_scale)


def _written(
    found: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    for buffer, value in zip(out or (), found, strict=False):
        buffer.copy_(value.detach())
    return found


def _unpacked(order: Tensor | None, num_clusters: int) -> TokenOrder | None:
    return None if order is None else TokenOrder.unpack(order, num_clusters)
