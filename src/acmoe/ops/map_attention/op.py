"""Register the Triton kernel of the op `map_attention`.

The kernel reads and writes tokens at their positions in the map, so the map is neither rolled nor
copied into windows and back. It is a custom op, so that `torch.compile(fullgraph=True)` sees one
call.

Shapes: B images, Y rows and X columns of the map, D = H * P features, N tokens of a window.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.flops import tell_counters
from acmoe.ops.map_attention.reference import check_windows, map_attention

_MOST_TOKENS, _MOST_FEATURES = 64, 128  # tokens of a window and features of a head in a tile


def unsupported(qkv: Tensor, bias: Tensor, window: tuple[int, int]) -> str | None:
    """Return the reason why the kernel cannot serve this call, or None."""
    features = qkv.shape[-1] // (3 * bias.shape[0])
    return kernel_unsupported(qkv, window[0] * window[1], features)


def kernel_unsupported(like: Tensor, tokens: int, features: int) -> str | None:
    """Return the reason why the kernel cannot serve windows of `tokens` tokens and heads of
    `features` features with the dtype and device of `like`, or None."""
    if like.is_cuda and like.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel multiplies 16-bit numbers, not {like.dtype}"
    if tokens > _MOST_TOKENS or features > _MOST_FEATURES:
        return (
            f"its kernel serves windows of {_MOST_TOKENS} tokens and heads of {_MOST_FEATURES} "
            f"features, not {tokens} and {features}"
        )
    return triton_unsupported(like, on_cpu=False)


@map_attention.register("triton", unsupported=unsupported)
def _map_attention_triton(
    qkv: Tensor, bias: Tensor, *, window: tuple[int, int], shift: tuple[int, int]
) -> Tensor:
    """Compute `map_attention` by the kernel; it sums the gradient of the bias in float32."""
    check_windows(qkv, window)
    tell_counters()
    found: Tensor = _map_attention(qkv.contiguous(), bias.float().contiguous(), *window, *shift)
    return found


@torch.library.custom_op("acmoe::map_attention", mutates_args=())
def _map_attention(
    qkv: Tensor, bias: Tensor, rows: int, columns: int, down: int, right: int
) -> Tensor:
    from acmoe.ops.map_attention.triton.map_attention import run_forward

    return run_forward(qkv, bias, (rows, columns), (down, right))


@_map_attention.register_fake
def _(qkv, bias, rows, columns, down, right):  # type: ignore[no-untyped-def]
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)


@torch.library.custom_op("acmoe::map_attention_backward", mutates_args=())
def _map_attention_backward(
    grad: Tensor, qkv: Tensor, bias: Tensor, rows: int, columns: int, down: int, right: int
) -> tuple[Tensor, Tensor]:
    from acmoe.ops.map_attention.triton.map_attention import run_backward

    return run_backward(grad, qkv, bias, (rows, columns), (down, right))


@_map_attention_backward.register_fake
def _(grad, qkv, bias, rows, columns, down, right):  # type: ignore[no-untyped-def]
    return torch.empty_like(qkv), torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, bias, *ctx.cut = inputs
    ctx.save_for_backward(qkv, bias)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _map_attention_backward(upstream.contiguous(), *ctx.saved_tensors, *ctx.cut)
    return (*gradients, None, None, None, None)


_map_attention.register_autograd(_backward, setup_context=_save)
