"""Dispersion by Triton kernels, for the measures mad, variance, std and iqr.

dispersion.py defines the results. It also computes what needs sorted values: gini, and iqr if a
gradient is needed.

B sets of T tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.checks import check_clusters, check_count, check_tokens
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.statistics.dispersion import dispersion_and_count, exclude

KERNEL_MEASURES = ("mad", "variance", "std", "iqr")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_dispersion(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return float32 dispersion (C, D) and count (C,); with a leading B for x of (B, T, D).

    Arguments, semantics and gradient are those of `dispersion_and_count`.
    """
    check_kernel_input(x, assignment, num_clusters, measure, token_mask, KERNEL_MEASURES)
    if measure == "iqr" and records_gradient(x):
        return dispersion_and_count(
            x, assignment, num_clusters, measure=measure, token_mask=token_mask
        )
    spread, count, _ = dispersion_op(*as_sets(x, assignment, token_mask), num_clusters, measure)
    return (spread, count) if x.dim() == 3 else (spread[0], count[0])


def check_kernel_input(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    measure: str,
    token_mask: Tensor | None,
    measures: tuple[str, ...],
) -> None:
    check(
        measure in measures,
        f"measure={measure!r} has no kernel; choose one of {', '.join(measures)}, or run the "
        "definition, acmoe.ops.dispatch.use_backend('torch')",
    )
    check_kernel_dtype(x)
    check_count(num_clusters, "num_clusters")
    check_tokens(x, assignment, token_mask)
    check_clusters(assignment, num_clusters)


def check_kernel_dtype(x: Tensor) -> None:
    check(
        x.dtype in KERNEL_DTYPES,
        f"x has dtype {x.dtype}; pass bfloat16, float16 or float32, or run the definition, "
        "acmoe.ops.dispatch.use_backend('torch')",
    )


def as_sets(
    x: Tensor, assignment: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x (B, T, D), assignment (B, T) and mask (B, T), with B = 1 added if it is missing."""
    if x.dim() == 3:
        return x, assignment, token_mask
    return x[None], assignment[None], None if token_mask is None else token_mask[None]


def summed_term(measure: str) -> str:
    """Return the term that kernels add up for a measure: absolute deviations, or squared ones."""
    return "mad" if measure == "mad" else "square"


@torch.library.custom_op("acmoe::dispersion", mutates_args=())
def dispersion_op(
    x: Tensor, assignment: Tensor, token_mask: Tensor | None, num_clusters: int, measure: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dispersion (B, C, D), count (B, C), and cluster means (B, C, D) for backward."""
    from acmoe.ops.statistics.triton.dispersion import partial_sums
    from acmoe.ops.statistics.triton.quantile import interquartile_range
    from acmoe.ops.statistics.triton.scale import reduce_to_dispersion

    if measure == "iqr":
        _, cluster_BT = exclude(x[..., :0], assignment, num_clusters, token_mask)
        spread_BCD, count_BC = interquartile_range(x, cluster_BT, num_clusters)
        return spread_BCD, count_BC, torch.empty_like(spread_BCD)
    partials = partial_sums(x, assignment, token_mask, num_clusters, summed_term(measure))
    spread_BCD, count_BC, _ = reduce_to_dispersion(partials, root=measure == "std")
    return spread_BCD, count_BC, partials.mean


@dispersion_op.register_fake
def _(
    x: Tensor, assignment: Tensor, token_mask: Tensor | None, num_clusters: int, measure: str
) -> tuple[Tensor, Tensor, Tensor]:
    spread = x.new_empty(x.shape[0], num_clusters, x.shape[2], dtype=torch.float32)
    return spread, spread.new_empty(spread.shape[:2]), torch.empty_like(spread)


@torch.library.custom_op("acmoe::dispersion_backward", mutates_args=())
def dispersion_backward_op(
    grad: Tensor,
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    spread: Tensor,
    count: Tensor,
    mean: Tensor,
    measure: str,
) -> Tensor:
    from acmoe.ops.statistics.triton.dispersion import partial_sums
    from acmoe.ops.statistics.triton.dispersion_backward import deviation_gradient

    C = spread.shape[1]
    share_BC1 = 1 / count.clamp(min=1)[..., None]
    # A cluster with a non-finite token has a dispersion of NaN and gets no gradient.
    weight_BCD = torch.where(spread.isfinite(), grad, 0.0) * share_BC1
    if measure == "mad":
        signs = partial_sums(x, assignment, token_mask, C, "sign").spread.sum(1) * share_BC1
        return deviation_gradient(x, assignment, token_mask, mean, weight_BCD, signs)
    if measure == "variance":
        weight_BCD = 2 * weight_BCD
    else:  # d std = d variance / (2 std); a constant feature gets the gradient 0
        weight_BCD = torch.where(spread > 0, weight_BCD / spread, 0.0)
    return deviation_gradient(x, assignment, token_mask, mean, weight_BCD, None)


@dispersion_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    spread: Tensor,
    count: Tensor,
    mean: Tensor,
    measure: str,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, assignment, token_mask, _, ctx.measure = inputs
    ctx.save_for_backward(x, assignment, token_mask, *output)


def _backward(ctx, grad, _count, _mean):  # type: ignore[no-untyped-def]
    grad_x = dispersion_backward_op(grad, *ctx.saved_tensors, ctx.measure)
    return grad_x, None, None, None, None


dispersion_op.register_autograd(_backward, setup_context=_save)
