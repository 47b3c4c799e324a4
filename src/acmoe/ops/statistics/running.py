"""The last batch moved into a running average, once per optimizer step, and the average's scale.

In plain PyTorch this is some fifty small operations a layer, more time than the statistics take;
on a GPU it is one launch.

C clusters, X numbers of each.
"""

import torch
from torch import Tensor

from acmoe.ops.dispatch import Option, choose, triton_obstacle
from acmoe.ops.statistics.op import ScaleOptions, scale_of


@torch.no_grad()
def fold_average(
    average_CX: Tensor, weight_C: Tensor, last_CX: Tensor, count_C: Tensor, momentum: float
) -> None:
    """Move a batch's means into an average, each cluster weighted by its tokens, in place.

    A cluster the batch did not reach (or reached once: one token has no dispersion) keeps its
    average and its weight, so a rare expert keeps its history. The count becomes 0: a batch is
    folded in once.
    """
    if _backend(average_CX, weight_C, last_CX, count_C) == "triton":
        fold_op(average_CX, weight_C, last_CX, count_C, None, momentum, 0.0, 0.0, 0)
    else:
        _fold(average_CX, weight_C, last_CX, count_C, momentum)


@torch.no_grad()
def fold_and_scale(
    average_CX: Tensor,
    weight_C: Tensor,
    last_CX: Tensor,
    count_C: Tensor,
    scale_CX: Tensor,
    momentum: float,
    options: ScaleOptions,
) -> None:
    """`fold_average`, and overwrite the scale with `scale_of` the average and its weight."""
    buffers = (average_CX, weight_C, last_CX, count_C)
    if options.direct and _backend(*buffers, scale_CX) == "triton":
        fold_op(*buffers, scale_CX, momentum, options.floor, options.eps, options.min_tokens)
    else:
        fold_average(*buffers, momentum)
        scale_CX.copy_(scale_of(average_CX, weight_C, options))


def _fold(
    average_CX: Tensor, weight_C: Tensor, last_CX: Tensor, count_C: Tensor, momentum: float
) -> None:
    seen_C = torch.where(count_C >= 2, count_C, 0.0)
    kept_C = torch.where(seen_C > 0, momentum * weight_C, weight_C)
    total_C = kept_C + seen_C
    share_C1 = (seen_C / total_C.clamp(min=1e-12))[:, None]
    # lerp by 0 would still read a NaN of the batch; such a batch is not folded in.
    sound_C1 = torch.isfinite(last_CX).all(-1, keepdim=True) & (share_C1 > 0)
    mixed_CX = average_CX + share_C1 * (last_CX - average_CX)
    average_CX.copy_(torch.where(sound_C1, mixed_CX, average_CX))
    weight_C.copy_(torch.where(sound_C1[:, 0], total_C, weight_C))
    count_C.zero_()


def _backend(*buffers: Tensor) -> str:
    obstacle = triton_obstacle(buffers[0])
    if not all(buffer.dtype == torch.float32 and buffer.is_contiguous() for buffer in buffers):
        obstacle = obstacle or "its kernel takes contiguous float32 averages"
    return choose("running averages", (Option("triton", obstacle), Option("torch", None)))


@torch.library.custom_op("acmoe::fold", mutates_args=("average", "weight", "count", "scale"))
def fold_op(
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
    from acmoe.ops.statistics.triton.running import fold

    fold(
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


@fold_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None
