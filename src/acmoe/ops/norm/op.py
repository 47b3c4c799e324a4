"""Residual sum and layer norm of post-norm blocks, fused into one pass each.

    add_norm(x, y)         norm(x + y)
    add_norm_twice(x, y)   norm(x + inner(x + dropout(y)))

Both return the result in the residual dtype and in the dtype of autocast. On a GPU the kernels read
x and y once, and save x, y, mean and rstd for backward. They are custom ops, so that
`torch.compile` sees one call.

T tokens, D features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op
from acmoe.ops.precision import autocast_dtype

_WIDEST = 1024  # features; one warp holds a row in registers


class Normed(NamedTuple):
    """A normalised sum in the residual dtype and in the dtype that GEMMs run in."""

    x: Tensor  # (..., D)
    x_low: Tensor  # (..., D) x in the dtype of autocast; x itself without autocast
    # (T, D) without data, or None: a gradient alias of x. Pass it to `add_norm_twice` together with
    # x. Autograd then delivers the gradient of x from that op separately from the gradient of other
    # consumers, and the backward kernel of this op adds the two, which saves a pass over memory.
    grad_alias: Tensor | None = None


@op
def add_norm(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Normed:
    """Return norm(x + y)."""
    found: Tensor = norm(x + y)
    return Normed(found, found)


def _add_norm_unsupported(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> str | None:
    return norm_unsupported(x, y, (norm,))


@add_norm.register("triton", unsupported=_add_norm_unsupported)
def _add_norm_triton(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Normed:
    low = autocast_dtype(x)
    arguments = (norm.weight, norm.bias, norm.eps, _dtype(x, y), low)
    out_TD, low_TD, alias_TD, _ = _once(_rows(x), _rows(y), *arguments)
    out = out_TD.view(x.shape)
    if low is None:
        return Normed(out, out)
    return Normed(out, low_TD.view(x.shape), alias_TD)


@op
def add_norm_twice(
    x: Tensor,
    y: Tensor,
    inner: nn.LayerNorm,
    norm: nn.LayerNorm,
    *,
    dropout: float = 0.0,
    grad_alias: Tensor | None = None,
) -> Normed:
    """Return norm(x + inner(x + dropout(y))).

    grad_alias: the gradient alias that `add_norm` returned with x. This definition ignores it.
    """
    inner_sum = inner(x + F.dropout(y, dropout))
    found: Tensor = norm(x + inner_sum)
    return Normed(found, found)


def _add_norm_twice_unsupported(
    x: Tensor, y: Tensor, inner: nn.LayerNorm, norm: nn.LayerNorm
) -> str | None:
    return norm_unsupported(x, y, (inner, norm))


@add_norm_twice.register("triton", unsupported=_add_norm_twice_unsupported)
def _add_norm_twice_triton(
    x: Tensor,
    y: Tensor,
    inner: nn.LayerNorm,
    norm: nn.LayerNorm,
    *,
    dropout: float = 0.0,
    grad_alias: Tensor | None = None,
) -> Normed:
    # Drawn on the device, so that every replay of a captured CUDA graph draws new dropout.
    seed = torch.zeros(1, dtype=torch.int64, device=x.device)
    if dropout > 0:
        seed = torch.randint_like(seed, 2**31)
    norms = (inner.weight, inner.bias, norm.weight, norm.bias, inner.eps, norm.eps)
    read = x if grad_alias is None else x.detach()
    low = autocast_dtype(x)
    arguments = (*norms, seed, dropout, _dtype(x, y), low, grad_alias)
    out_TD, low_TD, _ = _twice(_rows(read), _rows(y), *arguments)
    out: Tensor = out_TD.view(x.shape)
    return Normed(out, out if low is None else low_TD.view(x.shape))


def norm_unsupported(x: Tensor, y: Tensor, norms: tuple[nn.LayerNorm, ...]) -> str | None:
    """Return the reason why the kernels cannot serve this call, or None."""
    if x.shape != y.shape or any(norm.normalized_shape != x.shape[-1:] for norm in norms):
        return "its kernel is for tensors of one shape, and norms of their last dimension"
    if x.shape[-1] > _WIDEST:
        return f"its kernel holds rows of at most {_WIDEST} features, not {x.shape[-1]}"
    if any(norm.weight is None or norm.bias is None for norm in norms):
        return "its kernel is for norms with gain and bias"
    if x.numel() == 0:
        return "there are no tokens"
    return triton_unsupported(x, on_cpu=False) or triton_unsupported(y)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _dtype(x: Tensor, y: Tensor) -> torch.dtype:
    """Return the dtype of the result: float32 under autocast, as PyTorch's layer norm has it."""
    return torch.float32 if autocast_dtype(x) else torch.promote_types(x.dtype, y.dtype)


@torch.library.custom_op("acmoe::norm_sum", mutates_args=())
def _once(
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from acmoe.ops.norm.triton.launch import run_add_norm

    out, out_low, stat = run_add_norm(x, y, gain, bias, eps, dtype, low)
    return out, out_low, _grad_alias(out), stat


def _grad_alias(out: Tensor) -> Tensor:
    return out.new_empty(1).expand(out.shape)


@_once.register_fake
def _(x, y, gain, bias, eps, dtype, low):  # type: ignore[no-untyped-def]
    out = x.new_empty(x.shape, dtype=dtype)
    out_low = x.new_empty(0 if low is None else len(x), x.shape[1], dtype=low or dtype)
    return out, out_low, _grad_alias(out), x.new_empty(2, len(x), dtype=torch.float32)


@torch.library.custom_op("acmoe::norm_sum_backward", mutates_args=())
def _once_backward(
    grad: Tensor,
    low_grad: Tensor | None,
    alias_grad: Tensor | None,
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    stat: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from acmoe.ops.norm.triton.launch import run_add_norm_backward

    return run_add_norm_backward(grad, low_grad, alias_grad, x, y, gain, stat)


@_once_backward.register_fake
def _(grad, low_grad, alias_grad, x, y, gain, stat):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(y), stat.new_empty(2, x.shape[1])


def _save_once(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, gain, bias, *_ = inputs
    ctx.bias_dtype = bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, gain, output[3])


def _backward_once(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing unpacks each tensor only once
    grad, low, alias = (None if part is None else part.contiguous() for part in upstream[:3])
    if grad is None:
        grad, alias = alias, None
    if grad is None:
        grad = torch.zeros_like(saved[0])
    dx, dy, (dgain, dbias) = _once_backward(grad, low, alias, *saved)
    return dx, dy, dgain.to(saved[2].dtype), dbias.to(ctx.bias_dtype), None, None, None


_once.register_autograd(_backward_once, setup_context=_save_once)


@torch.library.custom_op("acmoe::norm_sum_twice", mutates_args=())
def _twice(
    x: Tensor,
    y: Tensor,
    inner_gain: Tensor,
    inner_bias: Tensor,
    gain: Tensor,
    bias: Tensor,
    inner_eps: float,
    eps: float,
    seed: Tensor,
    dropout: float,
    dtype: torch.dtype,
    low: torch.dtype | None,
    grad_alias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `add_norm_twice` on rows; grad_alias, if given, receives the gradient of x."""
    from acmoe.ops.norm.triton.launch import run_add_norm_twice

    inner, outer = (inner_gain, inner_bias, inner_eps), (gain, bias, eps)
    return run_add_norm_twice(x, y, inner, outer, seed, dropout, dtype, low)


@_twice.register_fake
def _(x, y, *arguments):  # type: ignore[no-untyped-def]
    dtype, low = arguments[8:10]
    out_low = x.new_empty(0 if low is None else len(x), x.shape[1], dtype=low or dtype)
    return x.new_empty(x.shape, dtype=dtype), out_low, x.new_empty(4, len(x), dtype=torch.float32)


@torch.library.custom_op("acmoe::norm_sum_twice_backward", mutates_args=())
def _twice_backward(
    grad: Tensor,
    low_grad: Tensor | None,
    x: Tensor,
    y: Tensor,
    inner_gain: Tensor,
    inner_bias: Tensor,
    gain: Tensor,
    seed: Tensor,
    stat: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from acmoe.ops.norm.triton.launch import SavedTwice, run_add_norm_twice_backward

    saved = SavedTwice(x, y, inner_gain, inner_bias, gain, seed, stat)
    return run_add_norm_twice_backward(grad, low_grad, saved, dropout)


@_twice_backward.register_fake
def _(grad, low_grad, x, y, inner_gain, inner_bias, gain, seed, stat, dropout):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(y), stat.new_empty(4, x.shape[1])


def _save_twice(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, inner_gain, inner_bias, gain, bias, _, _, seed, ctx.dropout, _, _, grad_alias = inputs
    ctx.bias_dtype, ctx.aliased = bias.dtype, grad_alias is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, inner_gain, inner_bias, gain, seed, output[2])


def _backward_twice(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad, low = (None if part is None else part.contiguous() for part in upstream[:2])
    if grad is None:
        grad, low = torch.zeros_like(saved[0]) if low is None else low, None
    dx, dy, parts = _twice_backward(grad, low, *saved, ctx.dropout)
    dtypes = (*(tensor.dtype for tensor in saved[2:5]), ctx.bias_dtype)
    gradients = (part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))
    dx, alias_grad = (None, dx) if ctx.aliased else (dx, None)
    return dx, dy, *gradients, None, None, None, None, None, None, alias_grad


_twice.register_autograd(_backward_twice, setup_context=_save_twice)
