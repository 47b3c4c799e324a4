"""Cluster statistics as ops: dispersion, and the scale computed from it.

T tokens, D features, C clusters, X any leading dimensions.
"""

from typing import Any

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
from acmoe.ops.statistics.set_op import lists_pay, set_cluster_scale, set_dispersion
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
    if measure in SCALE_MEASURES and not records_gradient(x):
        by_lists = _by_lists(x, num_clusters, order)
        if by_lists and eager(x, assignment, token_mask, order):
            return set_dispersion(
                *(x, assignment, num_clusters),
                measure=measure,
                token_mask=token_mask,
                order=order,
                into=out,
            )
        sorted_tokens = None if x.dim() == 3 else _unpacked(order, num_clusters)
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
    if x.dim() == 3 and x.shape[0] == 1 and order is not None and order.numel() > 0:
        one_set: dict[str, Any] = {
            "measure": measure,
            "order": order,
            "out": out and (out[0][0], out[1][0]),
        }
        return _scale_triton(x[0], assignment[0], num_clusters, options, **one_set)[None]
    settings = ScaleSettings.of(measure, options)
    tokens: tuple[Tensor, Tensor, int, ScaleSettings] = (x, assignment, num_clusters, settings)
    named: dict[str, Any] = {"chosen": options.chosen, "into": out}
    found: tuple[Tensor, Tensor | None, Tensor]
    if _by_lists(x, num_clusters, order):
        read = options.transform is not None
        named |= {"token_mask": token_mask, "order": order, "with_dispersion": read}
        found = set_cluster_scale(*tokens, **named)
    elif x.dim() == 2 and (clusters := _unpacked(order, num_clusters)) is not None:
        found = sorted_cluster_scale(x, clusters, settings, **named)
    else:
        found = fused_cluster_scale(*tokens, token_mask=token_mask, **named)
    scale, spread, count = found
    # Only a transform reads the dispersion of the lists.
    return scale if spread is None else options.transformed(scale, spread, count)


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


def _by_lists(x: Tensor, num_clusters: int, order: Tensor | None) -> bool:
    """Return True if the kernel for many sets of tokens serves x (triton/set_dispersion.py)."""
    if x.dim() != 3:
        return False
    sizes = x.shape[0], x.shape[1], num_clusters, x.shape[2]
    return lists_pay(*sizes, is_sorted=order is not None and order.numel() > 0)


def _unpacked(order: Tensor | None, num_clusters: int) -> TokenOrder | None:
    return None if order is None else TokenOrder.unpack(order, num_clusters)
