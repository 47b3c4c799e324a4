"""Theorem 1's weights by Newton's method, all steps in one launch (`solve` in ../optimum.py).

A program owns a row and all its features. Arithmetic is float64, as in the definition, whose steps
are ten launches each. A row is read and written once.

R rows, D features.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import launch, next_power_of_2


def newton_weights(s_RD: Tensor, lam_R: Tensor, steps: int, most_ratio: float) -> Tensor:
    """Return weights (R, D) that sum to one in each row, of contiguous float64 tensors."""
    weight_RD = s_RD.new_empty(s_RD.shape)
    (R, D), width = s_RD.shape, next_power_of_2(s_RD.shape[1])
    launch(
        _newton_kernel, (R,), s_RD, lam_R, weight_RD, D, STEPS=steps, MOST_RATIO=most_ratio,
        BD=width, num_warps=min(16, max(1, width // 128)),
    )  # fmt: skip
    return weight_RD


@triton.jit
def _newton_kernel(
    s_ptr, lam_ptr, weight_ptr, D, STEPS: tl.constexpr, MOST_RATIO: tl.constexpr, BD: tl.constexpr
):
    """Write the weights of one row: 1 / (t + u) at the root of H(t + u) = 1, over their sum.

    They are NaN if an s or lambda is NaN, or all s are infinite.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    valid = d < D
    s = tl.load(s_ptr + row * D + d, mask=valid, other=float("inf"))
    lam = tl.load(lam_ptr + row)
    number = tl.full((), 0.0, dtype=tl.float64) + D
    ratio = tl.where(valid, (tl.where(valid, s, 0.0) - tl.min(s)) / lam, 0.0)
    has_nan = tl.max((ratio != ratio).to(tl.int32)) > 0  # minimum and maximum lose it
    t = tl.minimum(ratio, MOST_RATIO)
    u = tl.maximum(1.0 - tl.sum(tl.where(valid, t, 0.0)) / number, 1.0 / number)
    for _ in range(STEPS):
        inverse = tl.where(valid, 1.0 / (t + u), 0.0)
        mean = tl.sum(inverse) / number
        share = inverse / mean
        slope = tl.sum(share * share) / number  # dH/du, between 1 and d
        # Rounding may move a converged u by an ulp: it stays in (0, 1].
        u = tl.minimum(u + tl.maximum((1.0 - 1.0 / mean) / slope, 0.0), 1.0)
    weight = tl.where(valid, 1.0 / (t + u), 0.0)
    weight = tl.where(has_nan, float("nan"), weight / tl.sum(weight))
    tl.store(weight_ptr + row * D + d, weight, mask=valid)
