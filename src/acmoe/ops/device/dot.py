"""Products of float32 accuracy on matrix units that multiply bf16.

A float32 number is a sum of three bf16 numbers, 8 bits each: high + middle + low. A product of two
such sums needs only its largest terms, added up in float32 from the smallest. With 6 terms the
relative error of a product is about 2^-23, with 3 about 2^-16; tf32x3, for comparison, costs as
much as 6 terms and leaves 2^-21. Terms are summed tile by tile, and tiles by the ordinary adders:
the matrix units truncate every addition, which over thousands of features would show.

With 4 terms the left number keeps two pieces and the right one three. Cutting to the nearest leaves
|middle| <= 2^-9 and |low| <= 2^-18 of a number, so that what is left out (low * high and middle *
middle) is at most 2^-17 of each product, of either sign; a left number of one or two pieces loses
at most middle * middle, a bf16 one nothing. With 3 terms both keep two: a product with a bf16
number on one side loses at most 2^-18.
"""

import torch
import triton
import triton.language as tl

# Triton's interpreter, the kernels' test bed without a GPU, multiplies bf16 tiles and converts
# booleans to bf16 by their bit patterns; there both go through float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def dot_precision(dtype: torch.dtype) -> str:
    """How `dot_as` multiplies rows and weights of a dtype: float32 as torch's own products do.

    By default those keep float32's accuracy, and tf32x3 does at three times the work; a user who
    lets them round to tf32 (`torch.set_float32_matmul_precision("high")`) lets these as well. 16
    bits are multiplied as they are, whatever the setting, so that it compiles nothing anew.
    """
    if dtype != torch.float32:
        return "ieee"
    # Not torch.get_float32_matmul_precision(): it raises where this newer setting was used.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


@triton.jit
def dot(left, right, total):
    """total + left @ right, left and right of the same dtype."""
    return dot_as(left, right, total, "ieee")


@triton.jit
def dot_as(left, right, total, PRECISION: tl.constexpr):
    """`dot`, where `dot_precision` says how float32 is multiplied."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def lone_dot(left, right):
    """left @ right of bf16, rounded to float32 before anything is added to it.

    The compiler would make `total + dot` one product that the matrix units add to `total`,
    truncating. Where it must mind inexact sums it does not; only 8-bit numbers have these.
    """
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=1)


@triton.jit
def as_number(condition, dtype: tl.constexpr):
    """1 where true, 0 elsewhere."""
    if INTERPRETED:
        number = condition.to(tl.float32).to(dtype)
    else:
        number = condition.to(dtype)
    return number


@triton.jit
def as_bf16(value):
    """The nearest bf16 number, still float32 (halves go up): cheaper than converting and back."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def dot_in_two(left, value, total):
    """total + left @ value for bf16 left and float32 values cut into two: 2^-18 a term."""
    high = as_bf16(value)
    low = (value - high).to(tl.bfloat16)
    return dot(left, high.to(tl.bfloat16), dot(left, low, total))


@triton.jit
def in_three(value):
    """Three bf16 numbers that sum to a float32 one."""
    high = as_bf16(value)
    middle = as_bf16(value - high)
    low = (value - high) - middle
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)


@triton.jit
def pieces(value, IS_BF16: tl.constexpr):
    """`in_three`; where every value is a bf16 number already the last two are not for use."""
    if IS_BF16:
        high = value.to(tl.bfloat16)
        middle, low = high, high
    else:
        high, middle, low = in_three(value)
    return high, middle, low


@triton.jit
def accurate_dot(
    left_high, left_middle, left_low, right_high, right_middle, right_low,
    LEFT_IS_BF16: tl.constexpr, RIGHT_IS_BF16: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """left @ right of tiles cut by `pieces`."""
    total = tl.zeros((left_high.shape[0], right_high.shape[1]), dtype=tl.float32)
    if TERMS == 6 and not LEFT_IS_BF16:
        total = dot(left_low, right_high, total)
    if TERMS >= 4 and not RIGHT_IS_BF16:
        total = dot(left_high, right_low, total)
    if TERMS == 6 and not (LEFT_IS_BF16 or RIGHT_IS_BF16):
        total = dot(left_middle, right_middle, total)
    if not LEFT_IS_BF16:
        total = dot(left_middle, right_high, total)
    if not RIGHT_IS_BF16:
        total = dot(left_high, right_middle, total)
    if LEFT_IS_BF16 and RIGHT_IS_BF16:
        # One product of several tiles is no chain: told so, or the sum of tiles goes into it.
        return lone_dot(left_high, right_high)
    return dot(left_high, right_high, total)
