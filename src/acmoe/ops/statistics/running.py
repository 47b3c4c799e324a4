"""Running averages of cluster statistics, updated once per optimizer step, and their scale.

In plain PyTorch an update takes about fifty small operations per layer, which take longer than the
statistics. The Triton kernel is one launch.

C clusters, X statistics of each.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op
from acmoe.ops.statistics.scale import ScaleOptions, scale_of


@op
@torch.no_grad()
def update_average(
    average_CX: Tensor, weight_C: Tensor, last_CX: Tensor, count_C: Tensor, momentum: float
) -> None:
    """Update the running average with the means of the last batch, in place.

    weight_C counts the tokens behind each cluster's average, discounted by momentum; the batch
    enters with its token count. A cluster with fewer than two tokens in the batch (one token has no
    dispersion) keeps its average and weight, so a rare expert keeps its history. count_C is set to
    0, so that a batch is used once.
    """
    seen_C = torch.where(count_C >= 2, count_C, 0.0)
    discounted_C = torch.where(seen_C > 0, momentum * weight_C, weight_C)
    total_C = discounted_C + seen_C
    share_C1 = (seen_C / total_C.clamp(min=1e-12))[:, None]
    # torch.where instead of a share of 0: 0 * NaN would carry a NaN of the batch into the average.
    used_C1 = torch.isfinite(last_CX).all(-1, keepdim=True) & (share_C1 > 0)
    mixed_CX = average_CX + share_C1 * (last_CX - average_CX)
    # A share of 1 (momentum 0) takes the batch as it is: a far larger average would round it away.
    mixed_CX = torch.where(share_C1 == 1, last_CX, mixed_CX)
    average_CX.copy_(torch.where(used_C1, mixed_CX, average_CX))
    weight_C.copy_(torch.where(used_C1[:, 0], total_C, weight_C))
    count_C.zero_()


def _average_unsupported(
    average_CX: Tensor, weight_C: Tensor, last_CX: Tensor, count_C: Tensor
) -> str | None:
    buffers = (average_CX, weight_C, last_CX, count_C)
    if not all(buffer.dtype == torch.float32 and buffer.is_contiguous() for buffer in buffers):
        return "its kernel takes contiguous float32 averages"
    return triton_unsupported(average_CX)


@update_average.register("triton", unsupported=_average_unsupported, by_triton=True)
@torch.no_grad()
def _update_average_triton(
    average_CX: Tensor, weight_C: Tensor, last_CX: Tensor, count_C: Tensor, momentum: float
) -> None:
    update_op(average_CX, weight_C, last_CX, count_C, None, momentum, 0.0, 0.0, 0)


@op
@torch.no_grad()
def update_average_and_scale(
    average_CX: Tensor,
    weight_C: Tensor,
    last_CX: Tensor,
    count_C: Tensor,
    scale_CX: Tensor,
    momentum: float,
    options: ScaleOptions,
) -> None:
    """Call `update_average`, then overwrite `scale_CX` with the scale of the new average."""
    update_average(average_CX, weight_C, last_CX, count_C, momentum)
    scale_CX.copy_(scale_of(average_CX, weight_C, options))


def _average_and_scale_unsupported(
    average_CX: Tensor,
    weight_C: Tensor,
    last_CX: Tensor,
    count_C: Tensor,
    scale_CX: Tensor,
    options: ScaleOptions,
) -> str | None:
    if not options.is_separable():
        return "its kernel scales each cluster by itself; these options compare clusters"
    if scale_CX.dtype != torch.float32 or not scale_CX.is_contiguous():
        return "its kernel takes contiguous float32 averages"
    return _average_unsupported(average_CX, weight_C, last_CX, count_C)


@update_average_and_scale.register(
    "triton", unsupported=_average_and_scale_unsupported, by_triton=True
)
@torch.no_grad()
def _update_average_and_scale_triton(
    average_CX: Tensor,
    weight_C: Tensor,
    last_CX: Tensor,
    count_C: Tensor,
    scale_CX: Tensor,
    momentum: float,
    options: ScaleOptions,
) -> None:
    buffers = (average_CX, weight_C, last_CX, count_C, scale_CX)
    update_op(*buffers, momentum, options.floor, options.eps, options.min_tokens)


@torch.library.custom_op("acmoe::fold", mutates_args=("average", "weight", "count", "scale"))
def update_op(
    average: Tensor,
    weight: Tensor,
    last: Tensor,
    count: Tensor,
    scale: Tensor | None,
    momentum: float,
    floor: float,
    eps: float,
    min_tokens: int,
) -> None:
    from acmoe.ops.statistics.triton.running import update_running

    update_running(
        average,
        weight,
        last,
        count,
        scale,
        momentum=momentum,
        floor=floor,
        eps=eps,
        min_tokens=min_tokens,
    )


@update_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None
