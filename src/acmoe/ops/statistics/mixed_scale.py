"""The scale of tokens that read several clusters: M = sum_j alpha_j M_j (Mix-k).

T tokens, D features, C clusters, J clusters read by each token.
"""

import torch
from torch import Tensor

from acmoe.ops.checks import check_clusters
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import eager, op
from acmoe.ops.grad_mode import records_gradient


@op
def mixed_scale(scale_CD: Tensor, assignment_TJ: Tensor, membership_TJ: Tensor) -> Tensor:
    """Return the diagonals (T, D): the clusters' scales, weighted by membership.

    assignment: -1 for no cluster, whose scale is 1.
    """
    scale_TJD = scale_CD[assignment_TJ.clamp(min=0)]
    scale_TJD = scale_TJD.masked_fill((assignment_TJ < 0)[..., None], 1.0)
    return (scale_TJD * membership_TJ[..., None].to(scale_TJD.dtype)).sum(1)


def _unsupported(scale_CD: Tensor, assignment_TJ: Tensor, membership_TJ: Tensor) -> str | None:
    if scale_CD.dtype != torch.float32:
        return f"it takes float32 scales, not {scale_CD.dtype}"
    if records_gradient(scale_CD, membership_TJ):
        return "its kernel has no gradient"
    if assignment_TJ.numel() == 0:
        return "there are no tokens"
    return triton_unsupported(scale_CD)


@mixed_scale.register("triton", unsupported=_unsupported, by_triton=True)
def _mixed_by_triton(scale_CD: Tensor, assignment_TJ: Tensor, membership_TJ: Tensor) -> Tensor:
    check_clusters(assignment_TJ, scale_CD.shape[0])
    tensors = scale_CD.detach(), assignment_TJ, membership_TJ.detach()
    return _launched(*tensors) if eager(*tensors) else mixed_scale_op(*tensors)


def _launched(scale_CD: Tensor, assignment_TJ: Tensor, membership_TJ: Tensor) -> Tensor:
    from acmoe.ops.statistics.triton.mixed_scale import launch_mixed_scale

    return launch_mixed_scale(
        scale_CD.contiguous(), assignment_TJ.contiguous(), membership_TJ.contiguous()
    )


mixed_scale_op = torch.library.custom_op("acmoe::mixed_scale", _launched, mutates_args=())


@mixed_scale_op.register_fake
def _(scale_CD: Tensor, assignment_TJ: Tensor, membership_TJ: Tensor) -> Tensor:
    return scale_CD.new_empty(assignment_TJ.shape[0], scale_CD.shape[1])
