"""Deviations of a small cluster in few instructions.

The passes of sorted_dispersion.py mask every step of 8 tokens, and wait in each for indices, then
for features. Here all steps but the last are full, so that nothing is masked; indices come one step
ahead; and the last step stays in registers between both passes. Both passes of a step take 420
instructions a warp instead of 605 (sm_90a, bf16).

D features.
"""

import triton
import triton.language as tl


@triton.jit
def _features_of(x_ptr, token, d, D, EXACT: tl.constexpr, INT64: tl.constexpr):
    """Load the (BT, BD) features d of the tokens. EXACT: all of them exist."""
    ptrs = x_ptr + (token.to(tl.int64) if INT64 else token)[:, None] * D + d[None, :]
    if EXACT:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=d[None, :] < D, other=0.0)
    return x


@triton.jit
def _widened(x):
    """Return x in float32, a bf16 number by one instruction, not by one and a half.

    The compiler does not see that this equals x.to(tl.float32): where x is converted twice, it
    would keep the float32 numbers, in twice the registers.
    """
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def _summed(deviation, MEASURE: tl.constexpr):
    return tl.sum(tl.abs(deviation) if MEASURE == "mad" else deviation * deviation, axis=0)


@triton.jit
def small_deviations(
    x_ptr, token_ptr, begin, end, d, D, MEASURE: tl.constexpr, EXACT: tl.constexpr,
    INT64: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the (BD,) sum of |x - mean| or (x - mean)^2 over all 16-bit tokens of a cluster."""
    step = tl.arange(0, BT)
    last = begin + (tl.maximum(end - begin, 1) - 1) // BT * BT
    inside = last + step < end
    last_token = tl.load(token_ptr + last + step, mask=inside, other=0)
    acc = tl.zeros((BD,), dtype=tl.float32)
    token = last_token
    if begin < last:
        token = tl.load(token_ptr + begin + step)
    for start in tl.range(begin, last, BT, num_stages=1):
        ahead = tl.load(token_ptr + tl.minimum(start + BT, last - BT) + step)
        acc += tl.sum(_widened(_features_of(x_ptr, token, d, D, EXACT, INT64)), axis=0)
        token = ahead
    ptrs = x_ptr + (last_token.to(tl.int64) if INT64 else last_token)[:, None] * D + d[None, :]
    held = tl.load(ptrs, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    acc += tl.sum(held.to(tl.float32), axis=0)
    # float64, so that the mean of equal tokens is exactly their value.
    inverse = 1.0 / tl.maximum(end - begin, 1).to(tl.float64)
    mean = (acc.to(tl.float64) * inverse).to(tl.float32)
    # 0 * mean is NaN only where real tokens make the feature's sum non-finite anyway.
    spread = _summed(_widened(held) - mean[None, :] * inside.to(tl.float32)[:, None], MEASURE)
    token = last_token
    if begin < last:
        token = tl.load(token_ptr + begin + step)
    for start in tl.range(begin, last, BT, num_stages=1):
        ahead = tl.load(token_ptr + tl.minimum(start + BT, last - BT) + step)
        x = _features_of(x_ptr, token, d, D, EXACT, INT64)
        spread += _summed(_widened(x) - mean[None, :], MEASURE)
        token = ahead
    return spread
