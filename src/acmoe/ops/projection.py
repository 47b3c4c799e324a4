"""A linear map of the positions in view, whose gradient goes to the newest of them alone.

Memory has no gradient. Autograd knows this of a joined tensor's parts, but only after it has
multiplied the whole gradient with the weight: for a memory four times as long as the segment, four
fifths of that product are thrown away.

Shapes: B batch, L length of the segment, N positions in view, D features, A features of the map.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.precision import autocast_dtype


def project(source: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    """source @ weight^T: (B, N, A) of source (B, N, D) and weight (A, D).

    The product is taken in the source's dtype, or in what autocast makes of it. `segment` (B, L, D)
    is what the source's last L positions are a copy of. It is not read, nor brought to the source's
    precision; their gradient goes there, and none to the source.
    """
    source = source.detach().to(autocast_dtype(source) or source.dtype)
    found: Tensor = _project(source, segment, weight.to(source.dtype))
    return found


@torch.library.custom_op("acmoe::project", mutates_args=())
def _project(source: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    return F.linear(source, weight)


@_project.register_fake
def _(source: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    return source.new_empty(*source.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    source, segment, weight = inputs
    ctx.length, ctx.dtype = segment.shape[1], segment.dtype
    ctx.save_for_backward(source, weight)


def _backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    source, weight = ctx.saved_tensors
    _, of_segment, of_weight = ctx.needs_input_grad
    segment_grad, weight_grad = _gradients(
        upstream, source, weight, ctx.length if of_segment else 0, of_weight
    )
    return (
        None,
        segment_grad.to(ctx.dtype) if of_segment else None,
        weight_grad if of_weight else None,
    )


@torch.library.custom_op("acmoe::project_backward", mutates_args=())
def _gradients(
    upstream: Tensor, source: Tensor, weight: Tensor, length: int, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Of the source's last `length` positions, (B, L, D), and of the weight, or (0, D) numbers.

    The first stream by stream: as one product it would first be copied, for those positions have
    gaps between them. Both in one op: a compiler would bring the weight into another form, and
    write an upstream that is not contiguous once for each product.
    """
    weight_BAD = weight.expand(upstream.shape[0], -1, -1)
    segment_grad = torch.bmm(upstream[:, upstream.shape[1] - length :], weight_BAD)
    if not of_weight:
        return segment_grad, weight.new_empty(0, weight.shape[1])
    return segment_grad, upstream.flatten(0, 1).T @ source.flatten(0, 1)


@_gradients.register_fake
def _(
    upstream: Tensor, source: Tensor, weight: Tensor, length: int, of_weight: bool
) -> tuple[Tensor, Tensor]:
    num, dim = weight.shape
    segment_grad = upstream.new_empty(upstream.shape[0], length, dim)
    return segment_grad, weight.new_empty(num if of_weight else 0, dim)


_project.register_autograd(_backward, setup_context=_save)
