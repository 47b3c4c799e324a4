"""The diagonal of M of each token, from the scales of clusters.

T tokens, or B sequences of L tokens; D features, C clusters, J clusters per token (Mix-k).
"""

import torch
from torch import Tensor

from acmoe.ops.route.set_rows import set_rows
from acmoe.ops.statistics.mixed_scale import mixed_scale
from acmoe.routing.state import RoutingState


def own_rows(scale: Tensor, state: RoutingState, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return diagonals of M as rows (X, D), and the row of each token; -1: M = I.

    scale: a result of `cluster_scale`. There is a row for each cluster of each sequence if that is
    (B, C, D) and tokens read one cluster, and otherwise a row for each token.
    """
    first_T, (T, J), B = state.assignment[:, 0], state.assignment.shape, scale.shape[0]
    if scale.dim() == 3 and J == 1:
        return scale.flatten(0, 1), set_rows(first_T, B, scale.shape[1])
    row_T = torch.arange(T, device=scale.device)
    if scale.dim() == 4 and J == 1:
        return scale.flatten(0, -2), row_T.masked_fill(first_T < 0, -1)
    return token_scale(scale, state, x).flatten(0, -2), row_T


def token_scale(scale: Tensor, state: RoutingState, x: Tensor) -> Tensor:
    """Return the diagonal of each token's M, shaped as x, from a result of `cluster_scale`."""
    if scale.dim() == 2 and state.assignment.shape[1] > 1:
        return mixed_scale(scale, state.assignment, state.membership).view(x.shape)
    lead = x.shape[:-1] if x.dim() == 3 else (1, x.shape[0])
    assignment_BLJ = state.assignment.view(*lead, state.assignment.shape[1])
    scale_BLJD = scale if scale.dim() == 4 else gather_scale(scale, assignment_BLJ)
    # A token in no cluster yet (first layer, fresh tokens) keeps M = I.
    scale_BLJD = scale_BLJD.masked_fill((assignment_BLJ < 0)[..., None], 1.0)
    return mix_scales(scale_BLJD, state.membership.view(assignment_BLJ.shape)).view(x.shape)


def gather_scale(scale: Tensor, assignment_BLJ: Tensor) -> Tensor:
    """Return (B, L, J, D) scales of each token's clusters, from (C, D) or (B, C, D)."""
    own_BLJ = assignment_BLJ.clamp(min=0)
    if scale.dim() == 2:
        return scale[own_BLJ]
    B, L, J = own_BLJ.shape
    index_BN1 = own_BLJ.view(B, L * J, 1).expand(-1, -1, scale.shape[-1])
    return scale.gather(1, index_BN1).view(B, L, J, scale.shape[-1])


def mix_scales(scale_BLJD: Tensor, membership_BLJ: Tensor) -> Tensor:
    """Return M = sum_j alpha_j M_j: the token's clusters weighted by its affinities (Mix-k)."""
    if scale_BLJD.shape[2] == 1:
        return scale_BLJD[:, :, 0]
    return (scale_BLJD * membership_BLJ[..., None].to(scale_BLJD.dtype)).sum(2)
