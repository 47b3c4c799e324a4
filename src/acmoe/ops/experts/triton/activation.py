"""Device functions for the activation between an expert's two GEMMs: ReLU, exact GELU, SwiGLU.

They are inlined in GEMM epilogues and in the activation's backward, elementwise on float32
registers, and read or write no memory. (Dropout is in device/dropout_rng.py.) An epilogue evaluates
them for N * F elements on the ordinary ALUs while the tensor cores wait or work on another tile, so
they use few instructions. Libdevice's erf takes about 30; it made up two thirds of the instructions
of the activation's backward at swin.
"""

import torch
import triton
import triton.language as tl

# True where inline PTX is not available: in the interpreter and on AMD GPUs.
_PORTABLE = tl.constexpr(triton.knobs.runtime.interpret or torch.version.hip is not None)
# Beyond this |h| the normal tail probability, 2e-8, is below float32 rounding.
_TAIL_CUTOFF = tl.constexpr(5.5)


@triton.jit
def normal_tail(h):
    """Return P(X > |h|) for a standard normal X, as exp2 of a polynomial in |h|.

    The polynomial was fitted to log2 of the tail on [0, 5.5]. The absolute error of the tail is at
    most 2e-6, its relative error 2^-12 up to |h| = 4. The absolute error of GELU, which multiplies
    by h, is 2e-7 including rounding to float32 (tests/kernels/experts/test_activation_kernel.py).
    """
    t = tl.minimum(tl.abs(h), _TAIL_CUTOFF)
    log2_tail = 3.4497396e-05 * t - 7.79430498e-04
    log2_tail = log2_tail * t + 8.10542703e-03
    log2_tail = log2_tail * t - 5.34322523e-02
    log2_tail = log2_tail * t - 4.58773673e-01
    log2_tail = log2_tail * t - 1.15119362e00
    return tl.exp2(log2_tail * t - 9.99994636e-01)


@triton.jit
def normal_cdf(h):
    """Return P(X < h) for a standard normal X."""
    tail = normal_tail(h)
    return tl.where(h < 0, tail, 1.0 - tail)


@triton.jit
def normal_pdf(h):
    """Return exp(-h^2 / 2) / sqrt(2 pi)."""
    # log2(e) / 2 and log2(sqrt(2 pi))
    return tl.exp2(h * h * -0.7213475204444817 - 1.3257480647361595)


@triton.jit
def relu(h):
    """Return max(h, 0); NaN stays NaN."""
    return tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(h):
    """Return h * P(X < h), computed as relu(h) - |h| * P(X > |h|)."""
    return relu(h) - tl.minimum(tl.abs(h), _TAIL_CUTOFF) * normal_tail(h)


@triton.jit
def sigmoid(h):
    """Return 1 / (1 + exp(-h)) in 4 instructions, flushing denormals to zero.

    Triton's sigmoid takes 14 instructions to preserve results below 2^-126; with it the up GEMM of
    olmoe's experts takes 3.65 ms instead of 3.45 (H200).
    """
    if _PORTABLE:
        value = tl.sigmoid(h)
    else:
        value = tl.inline_asm_elementwise(
            """
            mul.f32 $0, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 $0, $0;
            add.f32 $0, $0, 0f3F800000;
            rcp.approx.ftz.f32 $0, $0;
            """,
            "=&f,f",
            [h],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return value


@triton.jit
def silu(h):
    """Return h * sigmoid(h)."""
    return h * sigmoid(h)


@triton.jit
def activate(h, u, ACT: tl.constexpr):
    """Return act(h, u) and its derivatives by h and by u.

    SwiGLU is silu(h) * u. The other activations ignore u, and their derivative by u is not used.
    """
    if ACT == "swiglu":
        sig = sigmoid(h)
        slope_u = h * sig
        value, slope = slope_u * u, u * (sig + slope_u * (1.0 - sig))
    elif ACT == "gelu":
        cdf = normal_cdf(h)
        value, slope, slope_u = h * cdf, cdf + h * normal_pdf(h), h
    else:
        value, slope, slope_u = relu(h), tl.where(h > 0, 1.0, 0.0), h
    return value, slope, slope_u
