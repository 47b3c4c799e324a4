"""The clamped SwiGLU gate of GPT-OSS, as an op with a fused Triton kernel.

N rows, F hidden units.
"""

import torch
from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op


@op
def clamped_swiglu(h: Tensor, *, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """Return (N, F): (clamp(u, -limit, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit).

    Args:
        h: (N, 2F) gate and u.
        alpha: slope of the sigmoid; 1.702 in GPT-OSS.
        limit: bound of gate (from above) and of u (from both sides); 7 in GPT-OSS.
        interleaved: h is gate, u, gate, u, ... along its last dimension; otherwise F gates and
            then F units of u.
    """
    gate, u = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)
    gate, u = gate.clamp(max=limit), u.clamp(min=-limit, max=limit)
    return (u + 1) * (gate * torch.sigmoid(gate * alpha))


def _unsupported(h: Tensor) -> str | None:
    return "there are no rows" if h.numel() == 0 else triton_unsupported(h)


@clamped_swiglu.register("triton", unsupported=_unsupported)
def _clamped_swiglu_triton(h: Tensor, *, alpha: float, limit: float, interleaved: bool) -> Tensor:
    found: Tensor = _forward(h, alpha, limit, interleaved)
    return found


@torch.library.custom_op("acmoe::clamped_swiglu", mutates_args=())
def _forward(h: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    from acmoe.ops.experts.triton.clamped import run_clamped_swiglu

    return run_clamped_swiglu(h.contiguous(), alpha, limit, interleaved)


@_forward.register_fake
def _(h: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


@torch.library.custom_op("acmoe::clamped_swiglu_backward", mutates_args=())
def _gradient(grad: Tensor, h: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    from acmoe.ops.experts.triton.clamped import run_clamped_swiglu_backward

    return run_clamped_swiglu_backward(grad.contiguous(), h.contiguous(), alpha, limit, interleaved)


@_gradient.register_fake
def _(grad: Tensor, h: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    return h.new_empty(h.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    h, *ctx.options = inputs
    ctx.save_for_backward(h)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _gradient(grad, *ctx.saved_tensors, *ctx.options), None, None, None


_forward.register_autograd(_backward, setup_context=_save)
