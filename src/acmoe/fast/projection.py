"""Linear layers over memory and segment whose backward computes the segment's gradient alone.

Memory needs no gradient. If memory and segment are concatenated, autograd still multiplies the
whole upstream gradient by the weight before it drops the memory's part: with a memory four times as
long as the segment, four fifths of that GEMM are wasted.

Shapes: B batch, L length of the segment, N positions of the context (memory, then segment), D
features, H heads, P features of a head, A outputs of a layer of the context, C outputs of a layer
of the segment.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.flops import flop_formula, tell_counters
from acmoe.ops.precision import autocast_dtype, without_autocast


def project(context: Tensor, segment: Tensor | None, weight: Tensor) -> Tensor:
    """Return context @ weight^T (B, N, A), for context (B, N, D) and weight (A, D).

    The GEMM runs in the dtype of autocast, or else in that of the context. The last L positions of
    the context are a copy of `segment` (B, L, D). The values of `segment` are not read, but it
    receives the gradient of those positions, in its own dtype; the context receives none. With
    segment=None this is an ordinary linear layer.
    """
    if segment is None:
        return F.linear(context, weight)
    tell_counters()
    context = _gemm_input(context)
    found: Tensor = _project(context, segment, weight.to(context.dtype))
    return found


def project_joined(
    context: Tensor,
    segment: Tensor | None,
    newest: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    heads: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, N, 2 * H * width) of the context, queries (B, L, D) of `newest`.

    Each head's keys and values are padded with zeros to `width` features. Zero rows of the weight
    produce the padding: copying every key and value into wider rows took a tenth of a training step
    (H200, switch-enwik8). One GEMM reads the context, and the segment receives one gradient.
    """
    both_2HPD = torch.stack([key, value]).view(2, heads, -1, key.shape[1])
    weight = F.pad(both_2HPD, (0, 0, 0, width - both_2HPD.shape[2])).flatten(0, 2)
    if segment is None:
        return F.linear(context, weight), F.linear(newest, query)
    return project_both(context, segment, weight, query)


def project_both(
    context: Tensor, segment: Tensor, weight: Tensor, segment_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `project(context, segment, weight)` and segment @ segment_weight^T (B, L, C).

    In backward, the second GEMM accumulates into the segment gradient that the first has written;
    autograd would add the two gradients in a separate pass.
    """
    tell_counters()
    context = _gemm_input(context)
    copy, *weights = (t.to(context.dtype) for t in (segment.detach(), weight, segment_weight))
    found: tuple[Tensor, Tensor] = _project_both(context, copy, segment, *weights)
    return found


def merge_heads(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Return x @ weight^T for x (..., H * width) whose heads are padded to `width` features.

    The weight (D, H * P) is padded with zeros to match, so that neither x nor its gradient is
    copied.
    """
    if x.shape[-1] > weight.shape[1]:
        weight_DHP = weight.view(weight.shape[0], heads, -1)
        weight = F.pad(weight_DHP, (0, x.shape[-1] // heads - weight_DHP.shape[2])).flatten(1)
    return F.linear(x, weight)


def _gemm_input(x: Tensor) -> Tensor:
    return x.detach().to(autocast_dtype(x) or x.dtype)


@torch.library.custom_op("acmoe::project", mutates_args=())
def _project(context: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    return F.linear(context, weight)


@_project.register_fake
def _(context: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    return context.new_empty(*context.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    context, segment, weight = inputs
    ctx.length, ctx.dtype = segment.shape[1], segment.dtype
    ctx.save_for_backward(context, weight)


def _backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    context, weight = ctx.saved_tensors
    _, of_segment, of_weight = ctx.needs_input_grad
    segment_grad, weight_grad = _gradients(
        upstream, context, weight, ctx.length if of_segment else 0, of_weight
    )
    return (
        None,
        segment_grad.to(ctx.dtype) if of_segment else None,
        weight_grad if of_weight else None,
    )


@torch.library.custom_op("acmoe::project_backward", mutates_args=())
def _gradients(
    upstream: Tensor, context: Tensor, weight: Tensor, length: int, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the last `length` positions (B, L, D) and of the weight (A, D).

    Without `of_weight` the second has no rows. The first is a batched GEMM over streams: one GEMM
    would need a copy, because the last positions of all streams are not contiguous. Both GEMMs are
    in one op: around two ops torch.compile would transform the weight, and copy a non-contiguous
    upstream gradient for each GEMM.
    """
    with without_autocast(upstream):  # backward may run under autocast even if forward did not
        segment_grad = _segment_gradient(upstream, weight, length)
        return segment_grad, _weight_gradient(upstream, context, of_weight)


def _segment_gradient(upstream: Tensor, weight: Tensor, length: int) -> Tensor:
    weight_BAD = weight.expand(upstream.shape[0], -1, -1)
    return torch.bmm(upstream[:, upstream.shape[1] - length :], weight_BAD)


def _weight_gradient(upstream: Tensor, context: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return context.new_empty(0, context.shape[-1])
    return upstream.flatten(0, 1).T @ context.flatten(0, 1)


@_gradients.register_fake
def _(
    upstream: Tensor, context: Tensor, weight: Tensor, length: int, of_weight: bool
) -> tuple[Tensor, Tensor]:
    num, dim = weight.shape
    segment_grad = upstream.new_empty(upstream.shape[0], length, dim)
    return segment_grad, weight.new_empty(num if of_weight else 0, dim)


_project.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("acmoe::project_both", mutates_args=())
def _project_both(
    context: Tensor, copy: Tensor, segment: Tensor, weight: Tensor, segment_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `project_both`; `copy` holds the segment's values, `segment` gets the gradient."""
    return F.linear(context, weight), F.linear(copy, segment_weight)


@_project_both.register_fake
def _(
    context: Tensor, copy: Tensor, segment: Tensor, weight: Tensor, segment_weight: Tensor
) -> tuple[Tensor, Tensor]:
    found = context.new_empty(*context.shape[:-1], weight.shape[0])
    return found, copy.new_empty(*copy.shape[:-1], segment_weight.shape[0])


def _save_both(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    context, copy, segment, weight, segment_weight = inputs
    ctx.dtype = segment.dtype
    ctx.save_for_backward(context, copy, weight, segment_weight)


def _backward_both(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[2:]
    found = _both_gradients(*upstream, *ctx.saved_tensors, *wanted)
    segment_grad = found[0].to(ctx.dtype)
    gradients = zip((segment_grad, *found[1:]), wanted, strict=True)
    return None, None, *(gradient if one else None for gradient, one in gradients)


@torch.library.custom_op("acmoe::project_both_backward", mutates_args=())
def _both_gradients(
    upstream: Tensor,
    segment_upstream: Tensor,
    context: Tensor,
    copy: Tensor,
    weight: Tensor,
    segment_weight: Tensor,
    of_segment: bool,
    of_weight: bool,
    of_segment_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the segment and of both weights; one not asked for has no rows."""
    with without_autocast(upstream):
        segment_grad = _segment_gradient(upstream, weight, copy.shape[1] if of_segment else 0)
        if of_segment:
            segment_grad.flatten(0, 1).addmm_(segment_upstream.flatten(0, 1), segment_weight)
        return (
            segment_grad,
            _weight_gradient(upstream, context, of_weight),
            _weight_gradient(segment_upstream, copy, of_segment_weight),
        )


@_both_gradients.register_fake
def _(
    upstream: Tensor,
    segment_upstream: Tensor,
    context: Tensor,
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


_project_both.register_autograd(_backward_both, setup_context=_save_both)


@flop_formula("project")
def _(context: Tensor, segment: Tensor, weight: Tensor, **options: Any) -> int:
    return 2 * context.numel() * weight.shape[0]


@flop_formula("project_backward")
def _(
    upstream: Tensor,
    context: Tensor,
    weight: Tensor,
    length: int,
    of_weight: bool,
    **options: Any,
) -> int:
    of_position = 2 * weight.numel()
    return of_position * len(context) * (length + of_weight * context.shape[1])


@flop_formula("project_both")
def _(
    context: Tensor,
    copy: Tensor,
    segment: Tensor,
    weight: Tensor,
    segment_weight: Tensor,
    **options: Any,
) -> int:
    return 2 * (context.numel() * weight.shape[0] + copy.numel() * segment_weight.shape[0])


@flop_formula("project_both_backward")
def _(
    upstream: Tensor,
    segment_upstream: Tensor,
    context: Tensor,
    copy: Tensor,
    weight: Tensor,
    segment_weight: Tensor,
    of_segment: bool,
    of_weight: bool,
    of_segment_weight: bool,
    **options: Any,
) -> int:
    rows, segment_rows = context.shape[:2].numel(), copy.shape[:2].numel()
    of_context = segment_rows * of_segment + rows * of_weight
    return 2 * (
        weight.numel() * of_context
        + segment_weight.numel() * segment_rows * (of_segment + of_segment_weight)
    )
