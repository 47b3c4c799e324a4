"""The batch statistics of a layer in three launches: `ops.scale` over `ops.dispersion`, faster.

Sums of the tokens, sums of their deviations, and the scale. Without gradient: statistics that
should carry one use `ops.scale.scale_from_dispersion` on `fused_dispersion`.

B sets of T tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.fused_dispersion import as_sets, check_kernel_input
from acmoe.ops.scale import check_normalize

# The measures whose scale needs nothing but sums.
SCALE_MEASURES = ("mad", "variance", "std")


def fused_cluster_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
    normalize: str = "cluster",
    floor: float = 1e-3,
    eps: float = 0.0,
    clamp: float | None = None,
    min_tokens: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and dispersion (C, D) and count (C,), each with a leading B for x of (B, T, D).

    float32 and detached. The arguments are those of `dispersion` and `scale_from_dispersion`, with
    strength=None: w = 1/s.
    """
    check_kernel_input(x, assignment, num_clusters, measure, token_mask, SCALE_MEASURES)
    check_normalize(normalize)
    results = scale_op(
        *as_sets(x.detach(), assignment, token_mask),
        num_clusters,
        measure,
        normalize,
        floor,
        eps,
        clamp,
        min_tokens,
    )
    scale, spread, count = results if x.dim() == 3 else (result[0] for result in results)
    return scale, spread, count


@torch.library.custom_op("acmoe::cluster_scale", mutates_args=())
def scale_op(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    num_clusters: int,
    measure: str,
    normalize: str,
    floor: float,
    eps: float,
    clamp: float | None,
    min_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from acmoe.kernels.dispersion import partial_sums
    from acmoe.kernels.scale import finish_scale

    term = "mad" if measure == "mad" else "square"
    return finish_scale(
        partial_sums(x, assignment, token_mask, num_clusters, term),
        root=measure == "std",
        normalize=normalize,
        floor=floor,
        eps=eps,
        clamp=clamp,
        min_tokens=min_tokens,
    )


@scale_op.register_fake
def _(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    num_clusters: int,
    measure: str,
    normalize: str,
    floor: float,
    eps: float,
    clamp: float | None,
    min_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.new_empty(x.shape[0], num_clusters, x.shape[2], dtype=torch.float32)
    return scale, torch.empty_like(scale), scale.new_empty(scale.shape[:2])
