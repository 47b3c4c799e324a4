"""Causal statistics by Triton kernels: `prefix_dispersion` and its scale, for J = 1.

B sequences of L tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.checks import check_clusters, check_tokens
from acmoe.ops.dispatch import eager
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.statistics.dispersion_op import check_kernel_dtype
from acmoe.ops.statistics.prefix.reference import (
    PrefixMoments,
    check_prefix_measure,
    prefix_dispersion,
)
from acmoe.ops.statistics.prefix.shrinking import Prior
from acmoe.ops.statistics.scale import ScaleOptions


def fused_prefix_dispersion(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    *,
    measure: str,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, PrefixMoments]:
    """Compute the op `measure_prefix`: dispersion (B, L, 1, D), count (B, L, 1) and the moments.

    A token that is masked, not finite or in no cluster gets zeros. If a gradient is needed, the
    plain PyTorch definition computes both forward and backward.
    """
    own_BL = assignment_BLJ[..., 0]
    _check(x_BLD, own_BL, before, measure, token_mask)
    if records_gradient(x_BLD, *before):
        return prefix_dispersion(
            x_BLD, own_BL, assignment_BLJ, before, measure=measure, token_mask=token_mask
        )
    spread_BLD, count_BL, *after = prefix_op(x_BLD, own_BL, token_mask, *before, measure)
    return spread_BLD[:, :, None], count_BL[..., None], PrefixMoments(*after)


def fused_prefix_scale(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    prior: Prior,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, PrefixMoments]:
    """Compute the op `measure_prefix_scale`: the scale (B, L, 1, D) and the moments.

    A token that is masked, not finite or in no cluster gets ones.
    """
    own_BL = assignment_BLJ[..., 0]
    _check(x_BLD, own_BL, before, measure, token_mask)
    tensors = (x_BLD.detach(), own_BL, token_mask, *before)
    average = prior.dispersion.detach().float(), prior.weight.detach().float()
    run = _launched_scale if eager(*tensors, *average) else prefix_scale_op
    scale_BLD, *after = run(
        *(*tensors, *average, measure),
        prior_tokens=float(prior.tokens),
        floor=options.floor,
        eps=options.eps,
        min_tokens=options.min_tokens,
    )
    return scale_BLD[:, :, None], PrefixMoments(*after)


def _check(
    x: Tensor, assignment: Tensor, before: PrefixMoments, measure: str, token_mask: Tensor | None
) -> None:
    check_prefix_measure(measure)
    check_kernel_dtype(x)
    check_tokens(x, assignment, token_mask)
    check_clusters(assignment, before.tokens.shape[1])


@torch.library.custom_op("acmoe::prefix_dispersion", mutates_args=())
def prefix_op(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    tokens: Tensor,
    mean: Tensor,
    spread: Tensor,
    measure: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from acmoe.ops.statistics.triton.lists import list_tokens
    from acmoe.ops.statistics.triton.prefix import running_dispersion

    x, before, after = _contiguous(x, tokens, mean, spread)
    if x.shape[1] == 0:
        return *_results(x), tokens.clone(), mean.clone(), spread.clone()
    lists = list_tokens(x, assignment, token_mask, tokens.shape[1])
    spread_BLD, count_BL = running_dispersion(x, lists, before, after, measure)
    return spread_BLD, count_BL, *after


@prefix_op.register_fake
def _(x, assignment, token_mask, tokens, mean, spread, *rest):  # type: ignore[no-untyped-def]
    return *_results(x), *_moments_like(tokens, mean, spread)


def _launched_scale(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    tokens: Tensor,
    mean: Tensor,
    spread: Tensor,
    average: Tensor,
    weight: Tensor,
    measure: str,
    prior_tokens: float,
    floor: float,
    eps: float,
    min_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scale (B, L, D) of each token, and the three moments after the last one."""
    from acmoe.ops.statistics.triton.lists import list_tokens
    from acmoe.ops.statistics.triton.prefix import Shrinking, running_scale

    x, before, after = _contiguous(x, tokens, mean, spread)
    if x.shape[1] == 0:
        return _results(x)[0], tokens.clone(), mean.clone(), spread.clone()
    lists = list_tokens(x, assignment, token_mask, tokens.shape[1])
    shrinking = Shrinking(
        *(average.contiguous(), weight.contiguous(), prior_tokens, floor, eps, min_tokens)
    )
    return running_scale(x, lists, before, after, shrinking, measure), *after


prefix_scale_op = torch.library.custom_op("acmoe::prefix_scale", _launched_scale, mutates_args=())


@prefix_scale_op.register_fake
def _(x, assignment, token_mask, tokens, mean, spread, *rest):  # type: ignore[no-untyped-def]
    return _results(x)[0], *_moments_like(tokens, mean, spread)


def _contiguous(
    x: Tensor, tokens: Tensor, mean: Tensor, spread: Tensor
) -> tuple[Tensor, PrefixMoments, PrefixMoments]:
    """Return contiguous tokens and moments, and memory for the moments after the last token."""
    before = PrefixMoments(tokens.contiguous(), mean.contiguous(), spread.contiguous())
    return x.contiguous(), before, _moments_like(*before)


def _results(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return new float32 memory shaped as the tokens (B, L, D), and as their counts (B, L)."""
    out_BLD = x.new_empty(x.shape, dtype=torch.float32)
    return out_BLD, out_BLD.new_empty(x.shape[:2])


def _moments_like(tokens: Tensor, mean: Tensor, spread: Tensor) -> PrefixMoments:
    return PrefixMoments(*(torch.empty_like(moment) for moment in (tokens, mean, spread)))
