"""Dispersion, and dispersion with its scale, on the backend that serves the call.

D features, C clusters, X any leading dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.backend import Option, choose, triton_obstacle
from acmoe.ops.dispersion import dispersion_and_count
from acmoe.ops.fused_dispersion import KERNEL_MEASURES, fused_dispersion
from acmoe.ops.fused_scale import SCALE_MEASURES, fused_cluster_scale
from acmoe.ops.scale import scale_from_dispersion


class ScaleOptions(NamedTuple):
    """How a dispersion becomes a scale: the arguments of `scale_from_dispersion`."""

    normalize: str
    strength: float | None
    floor: float
    eps: float
    clamp: float | None
    min_tokens: int


def measured_dispersion(
    x: Tensor, assignment: Tensor, num_clusters: int, *, measure: str, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`dispersion_and_count`, by a kernel where there is one."""
    fused = _backend(x, measure in KERNEL_MEASURES) == "triton"
    compute = fused_dispersion if fused else dispersion_and_count
    return compute(x, assignment, num_clusters, measure=measure, token_mask=token_mask)


def measured_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale (X, C, D), dispersion (X, C, D) and count (X, C)."""
    constant = not (x.requires_grad and torch.is_grad_enabled())
    served = measure in SCALE_MEASURES and options.strength is None and constant
    if _backend(x, served) == "triton":
        return fused_cluster_scale(
            x,
            assignment,
            num_clusters,
            measure=measure,
            token_mask=token_mask,
            normalize=options.normalize,
            floor=options.floor,
            eps=options.eps,
            clamp=options.clamp,
            min_tokens=options.min_tokens,
        )
    spread, count = measured_dispersion(
        x, assignment, num_clusters, measure=measure, token_mask=token_mask
    )
    return scale_from_dispersion(spread, count, **options._asdict()), spread, count


def _backend(x: Tensor, served: bool) -> str:
    obstacle = triton_obstacle(x) if x.numel() else "there are no tokens"
    if obstacle is None and not served:
        obstacle = "this measure or option has no kernel"
    return choose("statistics", (Option("triton", obstacle), Option("torch", None)))
