"""Cross-entropy of a linear output layer, chunked over tokens so that the full logits never exist.

A vocabulary of 267,735 words makes the logits of 24,576 tokens 26 GB in float32. Here they are
computed for a chunk of tokens at a time, and the gradients of the chunk are computed while its
logits exist: three GEMMs as in the plain form, and nothing is recomputed in backward. Chunks run
over tokens alone: chunking the vocabulary too would cost a fourth GEMM, since the gradient of the
first words needs the normaliser of the last.

The bias is part of the GEMMs (output_layer.py).

Shapes: T tokens, D features, A = D + 8 features with the bias, V words (padded on a GPU), N tokens
of one chunk.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.errors import check
from acmoe.ops.checks import host_may_read
from acmoe.ops.cross_entropy.output_layer import (
    add_gemm,
    log_probabilities,
    logits_of,
    with_bias,
    with_ones,
)
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op, transforming
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.once import differentiable_once
from acmoe.ops.precision import autocast_dtype, without_autocast
from acmoe.ops.statistics.dispersion import accumulation_dtype

_LOGITS_ON_CPU = 2**22  # the most logits that exist at a time
# On a GPU, logits may take this share of its memory: chunks must be long enough that accumulating
# the weight gradient (V x A, read and written once per chunk) is cheap beside the GEMMs.
_SHARE_OF_GPU = 1 / 32
IGNORED = -100  # a target that does not count: the default ignore_index of torch's cross_entropy


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    chunk: int | None = None,
    token_mask: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the cross-entropy in nats of `softmax(x @ weight.T + bias)` against `targets`.

    Args:
        x: (T, D) hidden states.
        weight: (V, D) output layer.
        bias: (V,) or None.
        targets: (T,) word ids, -100 where a prediction does not count; those of masked tokens are
            not read.
        chunk: tokens whose logits exist at one time; None picks it from V and the device.
        token_mask: (T,) False at padding, which does not count and may hold any values; None: all
            are tokens.
        reduction: "mean" over counted tokens (0 when there are none), "sum", or "none" for
            (T,) losses with 0 at the others. "none" carries no gradient.

    Returns:
        float32 loss (float64 for float64 input).
    """
    _check(x, weight, targets, chunk, reduction)
    gemm_dtype = autocast_dtype(x) or x.dtype
    keep_T = counted(targets, token_mask)
    safe_T = targets if keep_T is None else targets.masked_fill(~keep_T, 0)
    x = _masked(x, token_mask)  # padding may hold any values
    if chunk is None:
        chunk = max(1, min(x.shape[0], _most_logits(x.device) // weight.shape[0]))
    # Autocast is off: it would cast the whole weight again in every chunk.
    with without_autocast(x):
        if transforming():
            losses_T = _masked(_plain_losses(x, weight, bias, safe_T, gemm_dtype), keep_T)
            if reduction == "none":
                return losses_T
            total: Tensor = losses_T.sum()
        elif reduction == "none":
            return _masked(_token_losses(x, weight, bias, safe_T, gemm_dtype, chunk), keep_T)
        else:
            total = _sum_of_losses(x, weight, bias, safe_T, keep_T, gemm_dtype, chunk)
        if reduction == "sum":
            return total
        return total / (max(1, len(x)) if keep_T is None else keep_T.sum().clamp(min=1))


def counted(targets_T: Tensor, token_mask_T: Tensor | None) -> Tensor | None:
    """Return (T,) True where a prediction counts: at tokens whose target is not -100; None: at all.

    A CPU looks whether any target is -100. On a GPU the host would wait for the answer.
    """
    scored_T = targets_T != IGNORED
    if host_may_read(targets_T) and bool(scored_T.all()):
        return token_mask_T
    return scored_T if token_mask_T is None else scored_T & token_mask_T


def _sum_of_losses(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Return the result of `_SumOfLosses`, which computes gradients in its forward.

    Autograd marks inputs as needing a gradient even if none is recorded, so they are detached then.
    """
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    total: Tensor = _SumOfLosses.apply(x, weight, bias, *rest)  # type: ignore[no-untyped-call]
    return total


def _most_logits(device: torch.device) -> int:
    """Return how many logits may exist at a time."""
    if device.type != "cuda":
        return _LOGITS_ON_CPU
    memory = torch.cuda.get_device_properties(device).total_memory
    return int(_SHARE_OF_GPU * memory) // torch.float32.itemsize


def cross_entropy_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, token_mask: Tensor
) -> Tensor:
    """Return the mean loss over unmasked tokens, from full logits; tests compare with it."""
    losses_T = F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")
    return losses_T[token_mask].mean()


def _check(x: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, reduction: str) -> None:
    check(x.ndim == 2, f"x has shape {tuple(x.shape)}; flatten it to (tokens, features)")
    check(
        targets.shape == x.shape[:1],
        f"targets have shape {tuple(targets.shape)} for {x.shape[0]} tokens; give one per token",
    )
    check(chunk is None or chunk > 0, f"chunk={chunk} must be at least 1 token")
    check(reduction in ("mean", "sum", "none"), f"reduction={reduction!r}: use mean, sum or none")
    check(
        not (reduction == "none" and records_gradient(x, weight)),
        "reduction='none' carries no gradient; call it under torch.no_grad() or use 'sum'",
    )


def _masked(x: Tensor, keep_T: Tensor | None) -> Tensor:
    """Set masked tokens to zero."""
    if keep_T is None:
        return x
    return x.masked_fill(~keep_T.view(-1, *[1] * (x.dim() - 1)), 0.0)


@op
def cross_entropy_chunk(
    x_NA: Tensor, weight_VA: Tensor, targets_N: Tensor, keep_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a chunk's losses (N,) and the gradient of its logits (N, V), in x's dtype.

    keep_N: True where a token counts; elsewhere the gradient is 0. None: all count.
    """
    log_NV = log_probabilities(x_NA, weight_VA)
    chosen_N1 = log_NV.gather(1, targets_N[:, None])
    grad_NV = _grad_of_logits(log_NV, chosen_N1, targets_N[:, None], x_NA.dtype)
    if keep_N is not None:
        grad_NV.masked_fill_(~keep_N[:, None], 0.0)
    return -chosen_N1[:, 0], grad_NV


@cross_entropy_chunk.register(
    "triton", unsupported=lambda x_NA: triton_unsupported(x_NA, on_cpu=False)
)
def _cross_entropy_chunk_triton(
    x_NA: Tensor, weight_VA: Tensor, targets_N: Tensor, keep_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy_chunk` by a kernel that overwrites the logits with their gradient."""
    from acmoe.ops.cross_entropy.triton.cross_entropy import gradient_view, softmax_gradient_

    logits_NV = logits_of(x_NA, weight_VA)
    share_N = torch.ones_like(logits_NV[:, 0]) if keep_N is None else keep_N.float()
    losses_N = softmax_gradient_(logits_NV, targets_N, share_N, x_NA.dtype)
    return losses_N, gradient_view(logits_NV, x_NA.dtype)


def _token_losses(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    gemm_dtype: torch.dtype,
    chunk: int,
) -> Tensor:
    x_TA, weight_VA = with_ones(x_TD, gemm_dtype), with_bias(weight_VD, bias_V, gemm_dtype)
    losses_T = x_TD.new_empty(x_TD.shape[0], dtype=accumulation_dtype(gemm_dtype))
    for start in range(0, x_TD.shape[0], chunk):
        rows = slice(start, start + chunk)
        log_NV = log_probabilities(x_TA[rows], weight_VA)
        losses_T[rows] = -log_NV.gather(1, targets_T[rows, None])[:, 0]
    return losses_T


def _plain_losses(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    gemm_dtype: torch.dtype,
) -> Tensor:
    """Return the (T,) losses from full logits, in operators that `torch.func` can transform."""
    bias_V = None if bias_V is None else bias_V.to(gemm_dtype)
    logits_TV = F.linear(x_TD.to(gemm_dtype), weight_VD.to(gemm_dtype), bias_V)
    logits_TV = logits_TV.to(accumulation_dtype(gemm_dtype))
    return F.cross_entropy(logits_TV, targets_T, reduction="none")


class _SumOfLosses(torch.autograd.Function):
    """Sum of losses over counted tokens; forward computes the gradients chunk by chunk.

    The result is a scalar, so backward only multiplies the stored gradients by one number.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        keep_T: Tensor | None,
        gemm_dtype: torch.dtype,
        chunk: int,
    ) -> Tensor:
        wide, features = accumulation_dtype(gemm_dtype), x_TD.shape[1]
        needs_x, *needs_layer = ctx.needs_input_grad[:3]
        x_TA, weight_VA = with_ones(x_TD, gemm_dtype), with_bias(weight_VD, bias_V, gemm_dtype)
        grad_x_TD = torch.empty_like(x_TD) if needs_x else None
        grad_VA = torch.zeros_like(weight_VA, dtype=wide) if any(needs_layer) else None
        total = x_TD.new_zeros((), dtype=wide)
        for start in range(0, x_TD.shape[0], chunk):
            rows = slice(start, start + chunk)
            keep_N = None if keep_T is None else keep_T[rows]
            losses_N, grad_NV = cross_entropy_chunk(x_TA[rows], weight_VA, targets_T[rows], keep_N)
            # Not in place: Dynamo of torch 2.11 gives such a result a gradient of zero, in silence.
            total = total + _masked(losses_N, keep_N).sum()
            if grad_x_TD is not None:
                grad_x_TD[rows] = grad_NV @ weight_VA[:, :features]
            if grad_VA is not None:
                add_gemm(grad_VA, grad_NV.T, x_TA[rows])
        ctx.save_for_backward(grad_x_TD, grad_VA)
        ctx.layer = weight_VD.shape, weight_VD.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    @differentiable_once  # the stored gradients are constants to autograd
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TD, grad_VA = ctx.saved_tensors
        (words, features), weight_dtype, bias_dtype = ctx.layer
        grad_x = grad_weight = grad_bias = None
        if grad_x_TD is not None:
            grad_x = grad_x_TD * upstream.to(grad_x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_VA[:words, :features] * upstream).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = (grad_VA[:words, features] * upstream).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _grad_of_logits(
    log_NV: Tensor, chosen_N1: Tensor, target_N1: Tensor, gemm_dtype: torch.dtype
) -> Tensor:
    """Return softmax minus one-hot, in the GEMM's dtype.

    p - 1 at the target is computed before rounding: the rounding error of a confident token's p
    would exceed the difference.
    """
    if log_NV.dtype == gemm_dtype:
        grad_NV = log_NV.exp_()
    else:
        grad_NV = torch.exp(log_NV, out=torch.empty_like(log_NV, dtype=gemm_dtype))
    return grad_NV.scatter_(1, target_N1, chosen_N1.expm1().to(gemm_dtype))
