"""Sums and layer norms around the parts of a post-norm block, in one pass each.

    norm_sum(x, y)           norm(x + y)
    norm_sum_lowered(x, y)   the same, and once more in 16 bits under autocast
    norm_sum_twice(x, y)     norm(x + inner(x + dropout(y))), likewise in both

The torch forms below are the definition; on a GPU kernels read x and y once and keep for the
backward those two and some numbers a token. Custom ops, so that `torch.compile` sees one call.

T tokens, D features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.dispatch import Option, choose, requested, triton_obstacle
from acmoe.ops.precision import autocast_dtype

_WIDEST = 1024  # features; a row lies in the registers of one warp


def norm_sum(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Tensor:
    """norm(x + y): (..., D)."""
    if _backend(x, y, (norm,)) == "torch":
        found: Tensor = norm(x + y)
        return found
    arguments = (norm.weight, norm.bias, norm.eps, _dtype(x, y), None)
    out: Tensor = _once(_rows(x), _rows(y), *arguments)[0]
    return out.view(x.shape)


def norm_sum_lowered(
    x: Tensor, y: Tensor, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor, Tensor | None]:
    """norm(x + y), the same in the precision that autocast has products in, and its echo.

    The echo, (T, D) of no memory and never read, stands for the first in `norm_sum_twice`: the
    gradient comes back by it, beside that of other readers, and no pass adds the two. None: it has
    none.
    """
    low = autocast_dtype(x)
    if low is None or _backend(x, y, (norm,)) == "torch":
        found = norm_sum(x, y, norm)
        return found, found, None
    arguments = (norm.weight, norm.bias, norm.eps, _dtype(x, y), low)
    out, again, echo, _ = _once(_rows(x), _rows(y), *arguments)
    return out.view(x.shape), again.view(x.shape), echo


def norm_sum_twice(
    x: Tensor,
    y: Tensor,
    inner: nn.LayerNorm,
    norm: nn.LayerNorm,
    dropout: float,
    *,
    echo: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """norm(x + inner(x + y)): (..., D), with a share `dropout` of y's numbers dropped; and the same
    in the precision that autocast has products in.

    `echo`: x's, from `norm_sum_lowered`.
    """
    if _backend(x, y, (inner, norm)) == "torch":
        y = inner(x + F.dropout(y, dropout))
        found: Tensor = norm(x + y)
        return found, found
    # On the device, so that a captured CUDA graph draws new dropout in every replay.
    seed = torch.zeros(1, dtype=torch.int64, device=x.device)
    if dropout > 0:
        seed = torch.randint_like(seed, 2**31)
    norms = (inner.weight, inner.bias, norm.weight, norm.bias, inner.eps, norm.eps)
    read = x if echo is None else x.detach()
    low = autocast_dtype(x)
    arguments = (*norms, seed, dropout, _dtype(x, y), low, echo)
    rows, again, _ = _twice(_rows(read), _rows(y), *arguments)
    out: Tensor = rows.view(x.shape)
    return out, out if low is None else again.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _dtype(x: Tensor, y: Tensor) -> torch.dtype:
    """Autocast has layer norms in float32."""
    return torch.float32 if autocast_dtype(x) else torch.promote_types(x.dtype, y.dtype)


def _backend(x: Tensor, y: Tensor, norms: tuple[nn.LayerNorm, ...]) -> str:
    options = (Option("triton", norm_obstacle(x, y, norms)), Option("torch", None))
    return choose("norms", options)


def norm_obstacle(x: Tensor, y: Tensor, norms: tuple[nn.LayerNorm, ...]) -> str | None:
    """What keeps the kernels from serving this call; None: nothing."""
    if x.shape != y.shape or any(norm.normalized_shape != x.shape[-1:] for norm in norms):
        return "its kernel is for tensors of one shape, and norms of their last dimension"
    if x.shape[-1] > _WIDEST:
        return f"its kernel holds rows of at most {_WIDEST} features, not {x.shape[-1]}"
    if any(norm.weight is None or norm.bias is None for norm in norms):
        return "its kernel is for norms with gain and bias"
    if not x.is_cuda and requested() != "triton":
        return "its interpreter is slow, and has to be asked for"
    if x.numel() == 0:
        return "there are no tokens"
    return triton_obstacle(x) or triton_obstacle(y)


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
    from acmoe.ops.norm.triton.launch import run_once

    out, again, stat = run_once(x, y, gain, bias, eps, dtype, low)
    return out, again, _echo(out), stat


def _echo(out: Tensor) -> Tensor:
    return out.new_empty(1).expand(out.shape)


@_once.register_fake
def _(x, y, gain, bias, eps, dtype, low):  # type: ignore[no-untyped-def]
    out = x.new_empty(x.shape, dtype=dtype)
    again = x.new_empty(0 if low is None else len(x), x.shape[1], dtype=low or dtype)
    return out, again, _echo(out), x.new_empty(2, len(x), dtype=torch.float32)


@torch.library.custom_op("acmoe::norm_sum_backward", mutates_args=())
def _once_backward(
    grad: Tensor,
    low_grad: Tensor | None,
    echo_grad: Tensor | None,
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    stat: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from acmoe.ops.norm.triton.launch import run_once_backward

    return run_once_backward(grad, low_grad, echo_grad, x, y, gain, stat)


@_once_backward.register_fake
def _(grad, low_grad, echo_grad, x, y, gain, stat):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(y), stat.new_empty(2, x.shape[1])


def _save_once(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, gain, bias, *_ = inputs
    ctx.bias_dtype = bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, gain, output[3])


def _of_once(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing hands each out a single time
    grad, low, echo = (None if part is None else part.contiguous() for part in upstream[:3])
    if grad is None:
        grad, echo = echo, None
    if grad is None:
        grad = torch.zeros_like(saved[0])
    dx, dy, (dgain, dbias) = _once_backward(grad, low, echo, *saved)
    return dx, dy, dgain.to(saved[2].dtype), dbias.to(ctx.bias_dtype), None, None, None


_once.register_autograd(_of_once, setup_context=_save_once)


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
    echo: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`echo` takes the gradient of x where it is given."""
    from acmoe.ops.norm.triton.launch import run_twice

    inner, outer = (inner_gain, inner_bias, inner_eps), (gain, bias, eps)
    return run_twice(x, y, inner, outer, seed, dropout, dtype, low)


@_twice.register_fake
def _(x, y, inner_gain, inner_bias, gain, bias, inner_eps, eps, seed, dropout, dtype, low, echo):  # type: ignore[no-untyped-def]
    again = x.new_empty(0 if low is None else len(x), x.shape[1], dtype=low or dtype)
    return x.new_empty(x.shape, dtype=dtype), again, x.new_empty(4, len(x), dtype=torch.float32)


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
    from acmoe.ops.norm.triton.launch import run_twice_backward

    return run_twice_backward(
        grad, low_grad, x, y, inner_gain, inner_bias, gain, seed, stat, dropout
    )


@_twice_backward.register_fake
def _(grad, low_grad, x, y, inner_gain, inner_bias, gain, seed, stat, dropout):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(y), stat.new_empty(4, x.shape[1])


def _save_twice(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, inner_gain, inner_bias, gain, bias, _, _, seed, ctx.dropout, _, _, echo = inputs
    ctx.bias_dtype, ctx.echoed = bias.dtype, echo is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, inner_gain, inner_bias, gain, seed, output[2])


def _of_twice(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad, low = (None if part is None else part.contiguous() for part in upstream[:2])
    if grad is None:
        grad, low = torch.zeros_like(saved[0]) if low is None else low, None
    dx, dy, parts = _twice_backward(grad, low, *saved, ctx.dropout)
    dtypes = (*(tensor.dtype for tensor in saved[2:5]), ctx.bias_dtype)
    gradients = (part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))
    dx, decho = (None, dx) if ctx.echoed else (dx, None)
    return dx, dy, *gradients, None, None, None, None, None, None, decho


_twice.register_autograd(_of_twice, setup_context=_save_twice)
