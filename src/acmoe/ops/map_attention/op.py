"""Attention inside the windows of a map as one op: no copies for rolling, cutting and joining.

A custom op, so that `torch.compile(fullgraph=True)` sees one call.

Shapes: B images, Y rows and X columns of the map, D = H * P features, N tokens of a window.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.dispatch import Option, choose, requested, triton_obstacle

_MOST_TOKENS, _MOST_FEATURES = 64, 128  # of a window and of a head: what one tile holds


def map_attention_fuses(
    device: torch.device, dtype: torch.dtype, *, tokens: int, features: int
) -> bool:
    """Whether the kernel serves windows of so many tokens, and heads of so many features."""
    obstacle = map_attention_obstacle(device, dtype, tokens, features)
    return choose("map attention", (Option("triton", obstacle), Option("torch", None))) == "triton"


def map_attention_obstacle(
    device: torch.device, dtype: torch.dtype, tokens: int, features: int
) -> str | None:
    on_gpu = device.type == "cuda"
    if not on_gpu and requested() != "triton":
        return "its interpreter is slow, and has to be asked for"
    if on_gpu and dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies 16-bit numbers, not {dtype}"
    if tokens > _MOST_TOKENS or features > _MOST_FEATURES:
        return (
            f"it serves windows of {_MOST_TOKENS} tokens and heads of {_MOST_FEATURES} features, "
            f"not {tokens} and {features}"
        )
    return triton_obstacle(torch.empty(0, dtype=dtype, device=device))


def map_attention(
    qkv: Tensor, bias: Tensor, *, window: tuple[int, int], shift: tuple[int, int]
) -> Tensor:
    """(B, Y, X, D): softmax(q . k / sqrt(P) + bias) v of every token over its window.

    qkv      (B, Y, X, 3D): query, key and value of each token, H heads of P features each
    bias     (H, N, N) by query and key of a window; its gradient is summed in float32
    window   rows and columns, which divide Y and X
    shift    by which the map is rolled up and to the left before it is cut; tokens that this brings
             together from two ends of it do not see each other
    """
    Y, X = qkv.shape[1:3]
    check(
        Y % window[0] == 0 and X % window[1] == 0,
        f"a map of {Y} x {X} tokens cannot be cut into windows of {window[0]} x {window[1]}; pass "
        "a window whose sides divide it",
    )
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
