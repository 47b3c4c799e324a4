"""The batch statistics of a layer in three launches: `ops.scale` over `ops.dispersion`, faster.

Sums of the tokens, sums of their deviations, and the scale. Without gradient: statistics that
should carry one use `ops.scale.scale_from_dispersion` on `fused_dispersion`.

B sets of T tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.statistics.dispersion_op import as_sets, check_kernel_input
from acmoe.ops.statistics.scale import check_normalize

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
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and dispersion (C, D) and count (C,), each with a leading B for x of (B, T, D).

    float32 and detached. The arguments are those of `dispersion` and `scale_from_dispersion`, with
    strength=None: w = 1/s. into: where dispersion and count are written, if given.
    """
    check_kernel_input(x, assignment, num_clusters, measure, token_mask, SCALE_MEASURES)
    check_normalize(normalize)
    spread, count = places_for(x, (*x.shape[:-2], num_clusters, x.shape[-1]), into)
    scale = scale_op(
        *as_sets(x.detach(), assignment, token_mask),
        spread,
        count,
        measure,
        normalize,
        floor,
        eps,
        clamp,
        min_tokens,
    )
    return scale, spread, count


def places_for(
    x: Tensor, shape: tuple[int, ...], into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Where the kernels write a dispersion of `shape` and its count: `into`, or new memory."""
    if into is None:
        spread = x.new_empty(shape, dtype=torch.float32)
        return spread, spread.new_empty(shape[:-1])
    for place, wanted in zip(into, (shape, shape[:-1]), strict=True):
        check(
            place.shape == wanted and place.dtype == torch.float32 and place.is_contiguous(),
            f"into holds a {place.dtype} tensor of shape {tuple(place.shape)}; pass contiguous "
            f"float32 of shape {wanted}",
        )
    return into


@torch.library.custom_op("acmoe::cluster_scale", mutates_args=("spread", "count"))
def scale_op(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    spread: Tensor,
    count: Tensor,
    measure: str,
    normalize: str,
    floor: float,
    eps: float,
    clamp: float | None,
    min_tokens: int,
) -> Tensor:
    """The scale, shaped as `spread`, of x (B, T, D); a single set may go without its B."""
    from acmoe.ops.statistics.triton.dispersion import partial_sums
    from acmoe.ops.statistics.triton.scale import finish_scale

    C, D = spread.shape[-2:]
    scale, _, _ = finish_scale(
        partial_sums(x, assignment, token_mask, C, "mad" if measure == "mad" else "square"),
        root=measure == "std",
        normalize=normalize,
        floor=floor,
        eps=eps,
        clamp=clamp,
        min_tokens=min_tokens,
        into=(spread.view(-1, C, D), count.view(-1, C)),
    )
    return scale.view_as(spread)


@scale_op.register_fake
def _(x, assignment, token_mask, spread, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(spread)
