"""What stands between an expert's two products: its activation (dropout: coins.py).

It is arithmetic on N * F numbers behind a product that the matrix units do, so it is made of few
instructions. The error function of the library takes about 30, and was two thirds of the backward's
activation at swin, by their count.
"""

import torch
import triton
import triton.language as tl

# Where there is no PTX: in the interpreter, and on other makers' GPUs.
_PORTABLE = tl.constexpr(triton.knobs.runtime.interpret or torch.version.hip is not None)
_FAR = tl.constexpr(5.5)  # from here on a normal's tail, 2e-8, is nothing beside float32's rounding


@triton.jit
def normal_tail(h):
    """P(X > |h|) of a normal X: two to the power of a polynomial in |h|.

    The polynomial was fitted to log2 of the tail on [0, 5.5]. The tail is off by at most 2e-6, and
    by 2^-12 of itself up to |h| = 4; GELU, which multiplies by h, by 2e-7 (rounding to float32
    included; tests/kernels/test_activation_kernel.py).
    """
    t = tl.minimum(tl.abs(h), _FAR)
    power = 3.4497396e-05 * t - 7.79430498e-04
    power = power * t + 8.10542703e-03
    power = power * t - 5.34322523e-02
    power = power * t - 4.58773673e-01
    power = power * t - 1.15119362e00
    return tl.exp2(power * t - 9.99994636e-01)


@triton.jit
def normal_below(h):
    """P(X < h) of a normal X."""
    tail = normal_tail(h)
    return tl.where(h < 0, tail, 1.0 - tail)


@triton.jit
def normal_density(h):
    # log2(e) / 2 and log2(sqrt(2 pi))
    return tl.exp2(h * h * -0.7213475204444817 - 1.3257480647361595)


@triton.jit
def positive(h):
    """max(h, 0); NaN stays NaN."""
    return tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(h):
    """h P(X < h): h less its tail where positive, minus the tail where not."""
    return positive(h) - tl.minimum(tl.abs(h), _FAR) * normal_tail(h)


@triton.jit
def sigmoid(h):
    """1 / (1 + exp(-h)), in 4 instructions; Triton's takes 14 to keep numbers below 2^-126, and the
    first product of olmoe's experts with it 3.65 for 3.45 ms (H200)."""
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
    return h * sigmoid(h)


@triton.jit
def activate(h, u, ACT: tl.constexpr):
    """The activation, and its slopes by h and by u, which only a gated one reads."""
    if ACT == "swiglu":
        sig = sigmoid(h)
        slope_u = h * sig
        value, slope = slope_u * u, u * (sig + slope_u * (1.0 - sig))
    elif ACT == "gelu":
        below = normal_below(h)
        value, slope, slope_u = h * below, below + h * normal_density(h), h
    else:
        value, slope, slope_u = positive(h), tl.where(h > 0, 1.0, 0.0), h
    return value, slope, slope_u
