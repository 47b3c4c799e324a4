"""A linear map of the positions in view, whose gradient goes to the newest of them alone.

Memory has no gradient. Autograd knows this of a joined tensor's parts, but only after it has
multiplied the whole gradient with the weight: for a memory four times as long as the segment, four
fifths of that product are thrown away.

Shapes: B batch, L length of the segment, N positions in view, D features, A features of the map,
C those of another map of the segment alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.precision import autocast_dtype, without_autocast


def project(source: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    """source @ weight^T: (B, N, A) of source (B, N, D) and weight (A, D).

    The product is taken in the source's dtype, or in what autocast makes of it. `segment` (B, L, D)
    is what the source's last L positions are a copy of. It is not read, nor brought to the source's
    precision; their gradient goes there, and none to the source.
    """
    source = _lowered(source)
    found: Tensor = _project(source, segment, weight.to(source.dtype))
    return found


def project_both(
    source: Tensor, segment: Tensor, weight: Tensor, segment_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`project`, and segment @ segment_weight^T, (B, L, C), in the same precision.

    The segment's gradient is one: the second product adds to what the first has written, where
    autograd would add the two in a pass of its own.
    """
    source = _lowered(source)
    copy, *weights = (t.to(source.dtype) for t in (segment.detach(), weight, segment_weight))
    found: tuple[Tensor, Tensor] = _project_both(source, copy, segment, *weights)
    return found


def _lowered(x: Tensor) -> Tensor:
    return x.detach().to(autocast_dtype(x) or x.dtype)


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
    with without_autocast(upstream):  # a backward may be called inside it, the forward outside
        segment_grad = _segment_gradient(upstream, weight, length)
        return segment_grad, _weight_gradient(upstream, source, of_weight)


def _segment_gradient(upstream: Tensor, weight: Tensor, length: int) -> Tensor:
    weight_BAD = weight.expand(upstream.shape[0], -1, -1)
    return torch.bmm(upstream[:, upstream.shape[1] - length :], weight_BAD)


def _weight_gradient(upstream: Tensor, source: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return source.new_empty(0, source.shape[-1])
    return upstream.flatten(0, 1).T @ source.flatten(0, 1)


@_gradients.register_fake
def _(
    upstream: Tensor, source: Tensor, weight: Tensor, length: int, of_weight: bool
) -> tuple[Tensor, Tensor]:
    num, dim = weight.shape
    segment_grad = upstream.new_empty(upstream.shape[0], length, dim)
    return segment_grad, weight.new_empty(num if of_weight else 0, dim)


_project.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("acmoe::project_both", mutates_args=())
def _project_both(
    source: Tensor, copy: Tensor, segment: Tensor, weight: Tensor, segment_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`copy` of the segment is read; the segment takes the gradient."""
    return F.linear(source, weight), F.linear(copy, segment_weight)


@_project_both.register_fake
def _(
    source: Tensor, copy: Tensor, segment: Tensor, weight: Tensor, segment_weight: Tensor
) -> tuple[Tensor, Tensor]:
    found = source.new_empty(*source.shape[:-1], weight.shape[0])
    return found, copy.new_empty(*copy.shape[:-1], segment_weight.shape[0])


def _save_both(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    source, copy, segment, weight, segment_weight = inputs
    ctx.dtype = segment.dtype
    ctx.save_for_backward(source, copy, weight, segment_weight)


def _of_both(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[2:]
    found = _both_gradients(*upstream, *ctx.saved_tensors, *wanted)
    segment_grad = found[0].to(ctx.dtype)
    gradients = zip((segment_grad, *found[1:]), wanted, strict=True)
    return None, None, *(gradient if one else None for gradient, one in gradients)


@torch.library.custom_op("acmoe::project_both_backward", mutates_args=())
def _both_gradients(
    upstream: Tensor,
    segment_upstream: Tensor,
    source: Tensor,
    copy: Tensor,
    weight: Tensor,
    segment_weight: Tensor,
    of_segment: bool,
    of_weight: bool,
    of_segment_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the segment, and of both weights; of what is not wanted none of the rows."""
    with without_autocast(upstream):
        segment_grad = _segment_gradient(upstream, weight, copy.shape[1] if of_segment else 0)
        if of_segment:
            segment_grad.flatten(0, 1).addmm_(segment_upstream.flatten(0, 1), segment_weight)
        return (
            segment_grad,
            _weight_gradient(upstream, source, of_weight),
            _weight_gradient(segment_upstream, copy, of_segment_weight),
        )


@_both_gradients.register_fake
def _(
    upstream: Tensor,
    segment_upstream: Tensor,
    source: Tensor,
    copy: Tensor,
    weight: Tensor,
    segment_weight: Tensor,
    of_segment: bool,
    of_weight: bool,
    of_segment_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, dim = copy.shape
    return (
        copy.new_empty(batch, length if of_segment else 0, dim),
        weight.new_empty(len(weight) if of_weight else 0, dim),
        weight.new_empty(len(segment_weight) if of_segment_weight else 0, dim),
    )


_project_both.register_autograd(_of_both, setup_context=_save_both)
