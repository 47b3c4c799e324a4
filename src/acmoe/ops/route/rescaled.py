"""The rescaled tokens x * scale[assignment], multiplied out: what most routers read.

The top-k router's kernels read the two factors instead (`ScaledTokens`).

T tokens, D features, C clusters. A shape (..., D) has T rows in all.
"""

import contextlib

import torch
from torch import Tensor

from acmoe.ops.bounded import bounded, sums_are_bounded
from acmoe.ops.checks import check_clusters, host_may_read
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op, untraced
from acmoe.ops.grad_mode import is_batched, records_gradient
from acmoe.ops.statistics.dispersion import accumulation_dtype

MOST_FEATURES = 8192  # of a row, which a program holds in its registers


@op
def rescaled_tokens(
    x: Tensor,
    scale_CD: Tensor | None,
    assignment_T: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the rescaled tokens (..., D) in float32: bf16 would flip near-ties of the top-k.

    scale: None for M = I. assignment: -1 for no cluster, M = I. Tokens beyond 2^32 are shrunk
    (`bounded`), before and after they are rescaled. dtype: what the result is rounded to; None
    leaves it in float32 (float64 for float64 tokens).
    """
    wide = _multiplied(x.to(accumulation_dtype(x.dtype)), scale_CD, assignment_T)
    return wide if dtype is None else wide.to(dtype)


def _multiplied(x: Tensor, scale_CD: Tensor | None, assignment_T: Tensor | None) -> Tensor:
    if scale_CD is None or assignment_T is None:
        return bounded(x)
    scale_TD = rows_of(scale_CD, assignment_T)
    scale = scale_TD if x.dim() == 2 else scale_TD.view(x.shape)
    if host_may_read(x) and host_may_read(scale_CD):
        few = scale_TD.shape[0] < scale_CD.shape[0]  # fewer tokens than clusters
        if sums_are_bounded(x, scale_TD if few else scale_CD):
            return x * scale
    return bounded(bounded(x) * scale)


def rows_of(scale_CD: Tensor, assignment_T: Tensor) -> Tensor:
    """Return (T, D): the scale of each token's cluster; ones for a token in no cluster, -1."""
    if host_may_read(assignment_T) and assignment_T.numpy()[0] >= 0:
        # torch checks all ids while it gathers. A first layer has no clusters: its -1 are not left
        # to torch, because an error takes longer to raise than it takes to look at the first.
        with contextlib.suppress(IndexError):
            return scale_CD.index_select(0, assignment_T)
    check_clusters(assignment_T, scale_CD.shape[0])
    scale_TD = scale_CD[assignment_T.clamp(min=0)]
    return scale_TD.masked_fill((assignment_T < 0)[:, None], 1.0)


def _unsupported(x: Tensor, scale_CD: Tensor | None, assignment_T: Tensor | None) -> str | None:
    if not untraced(x, scale_CD, assignment_T):
        return "something traces the call"
    if x.numel() == 0:
        return "there are no tokens"
    if x.shape[-1] > MOST_FEATURES:
        return f"its kernel takes up to {MOST_FEATURES} features, not {x.shape[-1]}"
    if scale_CD is not None and scale_CD.dtype != torch.float32:
        return f"its kernel takes float32 scales, not {scale_CD.dtype}"
    if records_gradient(scale_CD):
        return "its kernel has no gradient for the scale"
    return triton_unsupported(x)


@rescaled_tokens.register("triton", unsupported=_unsupported, by_triton=True)
def _rescaled_by_triton(
    x: Tensor,
    scale_CD: Tensor | None,
    assignment_T: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if scale_CD is None or assignment_T is None:
        scale_CD = assignment_T = None
    else:
        check_clusters(assignment_T, scale_CD.shape[0])
        scale_CD, assignment_T = scale_CD.detach().contiguous(), assignment_T.contiguous()
    given = (x, scale_CD, assignment_T, torch.float32 if dtype is None else dtype)
    found: Tensor = _Rescaled.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _Rescaled(torch.autograd.Function):
    """The rescaled tokens, with the gradient of x."""

    @staticmethod
    def forward(ctx, x, scale_CD, assignment_T, dtype):  # type: ignore[no-untyped-def]
        from acmoe.ops.route.triton.rescaled import rescale_rows

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y_TD, factor_2T = rescale_rows(rows, scale_CD, assignment_T, dtype)
        ctx.save_for_backward(scale_CD, assignment_T, factor_2T)
        ctx.dtype = x.dtype
        return y_TD.view(x.shape)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from acmoe.ops.route.triton.rescaled import rescale_gradient

        scale_CD, assignment_T, factor_2T = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        # create_graph=True: the gradient is differentiated in turn. is_grads_batched=True: a kernel
        # cannot read the gradients of a batch.
        if torch.is_grad_enabled() or is_batched(grad) or not untraced(grad):
            scale_TD = 1.0 if scale_CD is None else rows_of(scale_CD, assignment_T)
            found = (rows * scale_TD * factor_2T.prod(0)[:, None]).to(ctx.dtype)
        else:
            found = rescale_gradient(rows, scale_CD, assignment_T, factor_2T, ctx.dtype)
        return found.view(grad.shape), None, None, None
