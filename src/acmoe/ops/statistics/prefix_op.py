"""Causal dispersion by a Triton kernel: `prefix_dispersion` (prefix.py) for J = 1.

B sequences of L tokens, D features, C clusters.
"""

import torch
from torch import Tensor

from acmoe.ops.checks import check_clusters, check_tokens
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.statistics.dispersion import exclude, finite_tokens
from acmoe.ops.statistics.dispersion_op import check_kernel_dtype
from acmoe.ops.statistics.prefix import PrefixMoments, check_prefix_measure, prefix_dispersion


def fused_prefix_dispersion(
    x: Tensor,
    assignment: Tensor,
    before: PrefixMoments,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, PrefixMoments]:
    """Return dispersion (B, L, 1, D) and count (B, L, 1) of each token's cluster, and the moments.

    A token that is masked, not finite or in no cluster gets zeros. If a gradient is needed, the
    plain PyTorch definition computes both forward and backward.
    """
    check_prefix_measure(measure)
    check_kernel_dtype(x)
    check_tokens(x, assignment, token_mask)
    check_clusters(assignment, before.tokens.shape[1])
    if records_gradient(x, *before):
        return prefix_dispersion(
            x, assignment, assignment[..., None], before, measure=measure, token_mask=token_mask
        )
    spread_BLD, count_BL, *after = prefix_op(x, assignment, token_mask, *before, measure)
    return spread_BLD[:, :, None], count_BL[..., None], PrefixMoments(*after)


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
    from acmoe.ops.statistics.triton.prefix import running_dispersion

    kept_BL = finite_tokens(x) if token_mask is None else finite_tokens(x) & token_mask
    _, cluster_BL = exclude(x[..., :0], assignment, tokens.shape[1], kept_BL)
    return running_dispersion(x, cluster_BL, tokens, mean, spread, measure)


@prefix_op.register_fake
def _(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    tokens: Tensor,
    mean: Tensor,
    spread: Tensor,
    measure: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=torch.float32)
    after = (torch.empty_like(moment) for moment in (tokens, mean, spread))
    tokens_after, mean_after, spread_after = after
    return out, out.new_empty(x.shape[:2]), tokens_after, mean_after, spread_after
