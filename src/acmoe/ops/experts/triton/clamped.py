"""Kernels of the clamped SwiGLU gate, elementwise, forward and backward.

    out = (clamp(u, -limit, limit) + 1) * g * sigmoid(alpha * g)    with g = min(gate, limit)

h (N, 2F) holds gate and u: as pairs along the last dimension (INTERLEAVED), or all F gates and then
all F units of u. Both kernels are bound by memory: forward reads 2 * N * F elements and writes
N * F, backward reads 3 * N * F and writes 2 * N * F. PyTorch's elementwise operators take eight
passes for the forward alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.experts.triton.activation import sigmoid

_BLOCK, _WARPS = 1024, 4  # output elements and warps of a program


@triton.jit
def _load(h_ptr, first, size, F, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Return gate and u, float32, of the BLOCK output elements from `first` on."""
    if INTERLEAVED:
        at = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(h_ptr + at, mask=at < 2 * size.to(tl.int64), other=0.0).to(tl.float32)
        gate, u = both.reshape(BLOCK, 2).split()
    else:
        index = first + tl.arange(0, BLOCK)
        at = index // F * 2 * F + index % F
        gate = tl.load(h_ptr + at, mask=index < size, other=0.0).to(tl.float32)
        u = tl.load(h_ptr + at + F, mask=index < size, other=0.0).to(tl.float32)
    return gate, u


@triton.jit
def _clamped(gate, u, limit):
    """Return gate and u after clamping; a NaN stays NaN."""
    u = tl.where(u > limit, limit, u)
    return tl.where(gate > limit, limit, gate), tl.where(u < -limit, -limit, u)


@triton.jit(do_not_specialize=["size"])
def clamped_swiglu_kernel(
    h_ptr, out_ptr, size, F, alpha, limit, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write out (N, F), of `size` = N * F elements; a program computes BLOCK of them."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    gate, u = _load(h_ptr, first, size, F, INTERLEAVED, BLOCK)
    g, up = _clamped(gate, u, limit)
    value = (up + 1.0) * g * sigmoid(alpha * g)
    index = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=index < size)


@triton.jit(do_not_specialize=["size"])
def clamped_swiglu_backward_kernel(
    grad_ptr, h_ptr, dh_ptr, size, F, alpha, limit, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write dh (N, 2F) from grad (N, F). A clamped value has the derivative 0."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    index = first + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    gate, u = _load(h_ptr, first, size, F, INTERLEAVED, BLOCK)
    g, up = _clamped(gate, u, limit)
    sig = sigmoid(alpha * g)
    d_gate = grad * (up + 1.0) * sig * (1.0 + alpha * g * (1.0 - sig))
    d_gate = tl.where(gate > limit, 0.0, d_gate)
    d_u = tl.where((u > limit) | (u < -limit), 0.0, grad * g * sig)
    if INTERLEAVED:
        at = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.join(d_gate, d_u).reshape(2 * BLOCK)
        tl.store(dh_ptr + at, both.to(dh_ptr.dtype.element_ty), mask=at < 2 * size.to(tl.int64))
    else:
        at = index // F * 2 * F + index % F
        tl.store(dh_ptr + at, d_gate.to(dh_ptr.dtype.element_ty), mask=index < size)
        tl.store(dh_ptr + at + F, d_u.to(dh_ptr.dtype.element_ty), mask=index < size)


def run_clamped_swiglu(h: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """Return (N, F) for a contiguous h (N, 2F)."""
    out = torch.empty(h.shape[0], h.shape[1] // 2, dtype=h.dtype, device=h.device)
    clamped_swiglu_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        *(h, out, out.numel(), out.shape[1], alpha, limit),
        INTERLEAVED=interleaved,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out


def run_clamped_swiglu_backward(
    grad: Tensor, h: Tensor, alpha: float, limit: float, interleaved: bool
) -> Tensor:
    """Return the gradient of h (N, 2F), for contiguous grad (N, F) and h."""
    dh = torch.empty_like(h)
    clamped_swiglu_backward_kernel[(triton.cdiv(grad.numel(), _BLOCK),)](
        *(grad, h, dh, grad.numel(), grad.shape[1], alpha, limit),
        INTERLEAVED=interleaved,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return dh
