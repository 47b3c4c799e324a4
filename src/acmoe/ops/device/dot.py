"""Device functions for tile products on tensor cores, up to float32 accuracy by bf16 splits.

A float32 value is the sum of three bf16 values of 8 bits each, high + middle + low (a bf16x3 split;
high + middle alone is a bf16x2 split). The product of two split values needs only its largest
terms, added up in float32 from the smallest to the largest. The relative error of a product is
about 2^-23 with 6 terms and about 2^-16 with 3; tf32x3 costs as much as 6 terms and has 2^-21.
Terms are accumulated within a tile by the tensor cores and across tiles by ordinary float32
additions: tensor cores truncate every addition, which would show over thousands of features.

With 4 terms the left operand is split in two and the right one in three. Rounding to nearest leaves
|middle| <= 2^-9 and |low| <= 2^-18 of a value, so that the omitted terms (low * high and
middle * middle) are at most 2^-17 of each product, of either sign. If the left operand is exact in
two bf16 values, only middle * middle is omitted; if it is bf16, nothing is. With 3 terms both
operands are split in two: a product with a bf16 value on one side has an error of at most 2^-18.
"""

import torch
import triton
import triton.language as tl

# Triton's interpreter, which runs the kernels' tests without a GPU, multiplies bf16 tiles and
# converts booleans to bf16 by their bit patterns, which is wrong. There both go through float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input_precision with which `dot_with_precision` multiplies operands of a dtype.

    float32 follows torch's setting for its own GEMMs. By default these have float32 accuracy, as
    tf32x3 has at three times the work of tf32; a user who allows tf32 there
    (`torch.set_float32_matmul_precision("high")`) gets it here too. 16-bit operands ignore the
    setting, so that changing it does not recompile their kernels.
    """
    if dtype != torch.float32:
        return "ieee"
    # torch.get_float32_matmul_precision() raises if the user has set this newer attribute.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


@triton.jit
def dot(left, right, acc):
    """Return acc + left @ right for left and right of the same dtype."""
    return dot_with_precision(left, right, acc, "ieee")


@triton.jit
def dot_with_precision(left, right, acc, PRECISION: tl.constexpr):
    """Return acc + left @ right; PRECISION, of `dot_precision`, applies to float32 operands."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def dot_without_acc(left, right):
    """Return left @ right of bf16 operands, which the compiler does not fuse with a later addition.

    It would turn `acc + tl.dot(...)` into an MMA that accumulates into acc, truncating. It does not
    where max_num_imprecise_acc limits inexact accumulation, an option that otherwise only affects
    8-bit operands.
    """
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=1)


@triton.jit
def mask_to_dtype(condition, dtype: tl.constexpr):
    """Return 1 where the condition is true and 0 elsewhere, as `dtype`."""
    if INTERPRETED:
        number = condition.to(tl.float32).to(dtype)
    else:
        number = condition.to(dtype)
    return number


@triton.jit
def round_to_bf16(value):
    """Round float32 to the nearest bf16 value, kept as float32; ties round away from zero.

    This is cheaper than converting to bf16 and back.
    """
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def dot_bf16x2(left, value, acc):
    """Return acc + left @ value, left bf16, value float32 as a bf16x2 split: error 2^-18 a term."""
    high = round_to_bf16(value)
    low = (value - high).to(tl.bfloat16)
    return dot(left, high.to(tl.bfloat16), dot(left, low, acc))


@triton.jit
def split_bf16x3(value):
    """Split float32 value in three bf16 values (high, middle, low) that sum to it: bf16x3."""
    high = round_to_bf16(value)
    middle = round_to_bf16(value - high)
    low = (value - high) - middle
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)


@triton.jit
def split_bf16(value, IS_BF16: tl.constexpr):
    """Return the bf16x3 split of value; if IS_BF16, value is exact in `high`: ignore the others."""
    if IS_BF16:
        high = value.to(tl.bfloat16)
        middle, low = high, high
    else:
        high, middle, low = split_bf16x3(value)
    return high, middle, low


@triton.jit
def accurate_dot(
    left_high, left_middle, left_low, right_high, right_middle, right_low,
    LEFT_IS_BF16: tl.constexpr, RIGHT_IS_BF16: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Return left @ right in float32 from the results of `split_bf16`, with 3, 4 or 6 terms.

    An operand that IS_BF16 has only its `high`, so that the terms with its others are omitted.
    """
    acc = tl.zeros((left_high.shape[0], right_high.shape[1]), dtype=tl.float32)
    if TERMS == 6 and not LEFT_IS_BF16:
        acc = dot(left_low, right_high, acc)
    if TERMS >= 4 and not RIGHT_IS_BF16:
        acc = dot(left_high, right_low, acc)
    if TERMS == 6 and not (LEFT_IS_BF16 or RIGHT_IS_BF16):
        acc = dot(left_middle, right_middle, acc)
    if not LEFT_IS_BF16:
        acc = dot(left_middle, right_high, acc)
    if not RIGHT_IS_BF16:
        acc = dot(left_high, right_middle, acc)
    if LEFT_IS_BF16 and RIGHT_IS_BF16:
        # A single MMA: keep the compiler from fusing the caller's sum over tiles into it.
        return dot_without_acc(left_high, right_high)
    return dot(left_high, right_high, acc)
