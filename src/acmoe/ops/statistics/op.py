"""Dispersion, its scale, and causal dispersion, on the backend that serves the call.

B sequences of L tokens, D features, C clusters, J clusters per token, X any leading dimensions.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.dispatch import Option, choose, triton_obstacle
from acmoe.ops.sort.op import Clusters
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.dispersion_op import KERNEL_MEASURES, fused_dispersion
from acmoe.ops.statistics.log_scale import reshape_scale
from acmoe.ops.statistics.prefix import PrefixMoments, prefix_dispersion
from acmoe.ops.statistics.prefix_op import fused_prefix_dispersion
from acmoe.ops.statistics.scale import informs, scale_from_dispersion
from acmoe.ops.statistics.scale_op import SCALE_MEASURES, fused_cluster_scale
from acmoe.ops.statistics.sorted_op import sorted_cluster_scale, sorted_dispersion


class ScaleOptions(NamedTuple):
    """How a dispersion becomes a scale: what `scale_from_dispersion` and `reshape_scale` take."""

    normalize: str
    strength: float | Tensor | None
    floor: float
    eps: float
    clamp: float | None
    min_tokens: int
    power: float = 1.0
    part: str = "both"

    @property
    def direct(self) -> bool:
        """Whether a cluster's scale is its 1/s over their mean, whatever the others' are."""
        plain = self.strength is None and self.clamp is None and self.normalize == "cluster"
        return plain and not self.reshaped

    @property
    def reshaped(self) -> bool:
        return self.power != 1 or self.part != "both"


def measured_dispersion(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str,
    token_mask: Tensor | None,
    clusters: Clusters | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`dispersion_and_count`, by a kernel where there is one.

    clusters: the same tokens sorted by `assignment`, masked ones in none, where somebody did that.
    into: float32 buffers that take both results, and may be what is returned.
    """
    fused = _backend(x, measure in KERNEL_MEASURES) == "triton"
    if fused and clusters is not None and measure in SCALE_MEASURES and _constant(x):
        return sorted_dispersion(x, clusters, measure=measure, into=into)
    compute = fused_dispersion if fused else dispersion_and_count
    found = compute(x, assignment, num_clusters, measure=measure, token_mask=token_mask)
    if into is not None:
        for place, value in zip(into, found, strict=True):
            place.copy_(value.detach())
    return found


def measured_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None,
    clusters: Clusters | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scale (X, C, D), in memory of its own; clusters and into as `measured_dispersion`."""
    served = measure in SCALE_MEASURES and options.strength is None and _constant(x)
    if _backend(x, served) == "triton":
        if clusters is not None:
            compute = partial(sorted_cluster_scale, x, clusters)
        else:
            compute = partial(fused_cluster_scale, x, assignment, num_clusters)
            compute = partial(compute, token_mask=token_mask)
        scale, spread, count = compute(
            measure=measure,
            normalize=options.normalize,
            floor=options.floor,
            eps=options.eps,
            clamp=options.clamp,
            min_tokens=options.min_tokens,
            into=into,
        )
        return _reshaped(scale, spread, count, options)
    spread, count = measured_dispersion(
        x,
        assignment,
        num_clusters,
        measure=measure,
        token_mask=token_mask,
        clusters=clusters,
        into=into,
    )
    return scale_of(spread, count, options)


def scale_of(spread: Tensor, count: Tensor, options: ScaleOptions) -> Tensor:
    """Scale (X, C, D) of a dispersion (X, C, D) and count (X, C) in hand."""
    scale = scale_from_dispersion(
        spread,
        count,
        normalize=options.normalize,
        strength=options.strength,
        floor=options.floor,
        eps=options.eps,
        clamp=options.clamp,
        min_tokens=options.min_tokens,
    )
    return _reshaped(scale, spread, count, options)


def _reshaped(scale: Tensor, spread: Tensor, count: Tensor, options: ScaleOptions) -> Tensor:
    if not options.reshaped:
        return scale
    occupied = informs(spread, count, eps=options.eps, min_tokens=options.min_tokens)
    return reshape_scale(
        scale, occupied, power=options.power, part=options.part, normalize=options.normalize
    )


def measured_prefix(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    *,
    measure: str,
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor, PrefixMoments]:
    """`prefix_dispersion` of each token's clusters, the first of which is its own."""
    own_BL = assignment_BLJ[..., 0]
    obstacle = triton_obstacle(x_BLD) if x_BLD.numel() else "there are no tokens"
    if obstacle is None and assignment_BLJ.shape[-1] > 1:
        obstacle = "it reads one cluster per token"
    options = (Option("triton", obstacle), Option("torch", None))
    if choose("prefix statistics", options) == "triton":
        return fused_prefix_dispersion(
            x_BLD, own_BL, before, measure=measure, token_mask=token_mask
        )
    return prefix_dispersion(
        x_BLD, own_BL, assignment_BLJ, before, measure=measure, token_mask=token_mask
    )


def _constant(x: Tensor) -> bool:
    """Whether no gradient is asked for."""
    return not (x.requires_grad and torch.is_grad_enabled())


def _backend(x: Tensor, served: bool) -> str:
    obstacle = triton_obstacle(x) if x.numel() else "there are no tokens"
    if obstacle is None and not served:
        obstacle = "this measure or option has no kernel"
    return choose("statistics", (Option("triton", obstacle), Option("torch", None)))
