"""Epilogue of the statistics kernels: one cluster's summed terms to dispersion and scale.

    dispersion s (D,) = sum / tokens, or its square root
    scale (D,) = w / mean(w),  w = 1 / (max(s, floor * mean(s)) + eps)

These are device functions. The program that holds the complete sum of a cluster calls them: in
scale.py, sorted_dispersion.py and, for the running average, running.py. Arithmetic is float64, as
in ../scale.py: reciprocals of tiny dispersions overflow float32.

D features.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.statistics.pending import LEAST
from acmoe.ops.statistics.triton.pending import load_pending, merge_batch

# A sum that contains POISON (dispersion.py) is at least this.
NON_FINITE_SUM = tl.constexpr(1e38)
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest and largest normal float32
HUGE = tl.constexpr(3.4028234663852886e38)
_LEAST = tl.constexpr(LEAST)
ROW_STATISTICS = tl.constexpr(3)  # mean dispersion, 1 if informative, sum of weights


class Outputs(NamedTuple):
    """The tensors that the epilogue writes, and the one that it may copy."""

    dispersion: Tensor | None  # (C, D) float32, with a leading B if there are several sets
    count: Tensor  # (C,)
    out: Tensor  # the result
    pending: Tensor | None = None  # means (C, D) that the dispersion is added to
    pending_count: Tensor | None = None  # and their counts (C,)
    known: Tensor | None = None  # (C, D), read only: copied to `out` if the result is "copy"


class Epilogue(NamedTuple):
    """What the epilogue computes."""

    result: str = "dispersion"  # RESULT of `cluster_epilogue`
    root: bool = False  # take the square root (std from variance)
    floor: float = 0.0
    eps: float = 0.0
    min_tokens: int = 0

    @property
    def numbers(self) -> tuple[float, float, int]:
        return self.floor, self.eps, self.min_tokens

    @property
    def flags(self) -> dict[str, Any]:
        return {"ROOT": self.root, "RESULT": self.result}


@triton.jit
def cluster_epilogue(
    total, tokens, row, d, D, dispersion_ptr, count_ptr, out_ptr, pending_ptr, pending_count_ptr,
    known_ptr, floor, eps, min_tokens, ROOT: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Store a cluster's dispersion and count, then its scale or the statistics to normalise it by.

    total: float64 sums of all features d. row: index of the cluster in the outputs. pending: means
    and counts that the dispersion is added to, or None. RESULT: "dispersion" (nothing more), "copy"
    (the known numbers (C, D), copied), "scale", or "rows" (the ROW_STATISTICS that scale.py
    normalises by). dispersion_ptr: None stores no dispersion.
    """
    valid = d < D
    if RESULT == "copy":
        known = tl.load(known_ptr + row * D + d, mask=valid, other=0.0)
        tl.store(out_ptr + row * D + d, known, mask=valid)
    pending = (0.0, 0.0)
    if pending_ptr is not None:  # before the barriers below, over which no load moves
        pending = load_pending(pending_ptr, pending_count_ptr, row, d, D)
    inverse_count = 1.0 / tl.maximum(tokens, 1).to(tl.float64)
    s = total * inverse_count
    if ROOT:
        s = tl.sqrt(s)
    s = tl.where(total < NON_FINITE_SUM, s, float("nan")).to(tl.float32)
    mean = mean_of(s, valid, D)
    # One token that is not finite makes all features of its cluster NaN, through the mean.
    s = tl.where(mean == mean, s, float("nan"))
    if dispersion_ptr is not None:
        tl.store(dispersion_ptr + row * D + d, s, mask=valid)
    tl.store(count_ptr + row, tokens.to(tl.float32))
    if pending_ptr is not None:
        # Finite float32 numbers have a finite mean in float64, and others have not.
        accept = (tokens >= _LEAST) & (tl.abs(mean) < float("inf"))
        count = tokens.to(tl.float32)
        merge_batch(pending_ptr, pending_count_ptr, pending, s, count, accept, row, d, D)

    if RESULT == "scale" or RESULT == "rows":
        weight, weight_sum, informative = reciprocals(
            s, mean, tokens, valid, floor, eps, min_tokens
        )
        if RESULT == "scale":
            scale = mean_one(weight, weight_sum, informative, D)
            tl.store(out_ptr + row * D + d, scale.to(tl.float32), mask=valid)
        else:
            tl.store(out_ptr + row * ROW_STATISTICS, mean)
            tl.store(out_ptr + row * ROW_STATISTICS + 1, informative.to(tl.float64))
            tl.store(out_ptr + row * ROW_STATISTICS + 2, weight_sum)


@triton.jit
def mean_of(s, valid, D):
    """Mean over features; NaN if one of them is NaN."""
    return tl.sum(tl.where(valid, s.to(tl.float64), 0.0)) / D


@triton.jit
def reciprocals(s, mean, tokens, valid, floor, eps, min_tokens):
    """Return 1 / s of one cluster (s floored), their sum, and whether the cluster is informative.

    A cluster is informative if it has min_tokens tokens and its mean dispersion is finite and,
    where eps is 0, positive.
    """
    s = tl.where(valid, s.to(tl.float64), 0.0)
    informative = (tokens >= min_tokens) & (mean < NON_FINITE_SUM) & ((eps > 0) | (mean > 0))
    weight = 1.0 / tl.where(informative, tl.maximum(s, floor * mean) + eps, 1.0)
    weight_sum = tl.where(informative, tl.sum(tl.where(valid, weight, 0.0)), 0.0)
    return weight, weight_sum, informative


@triton.jit
def mean_one(weight, weight_sum, informative, D):
    """Divide the weights of one cluster by their mean; ones if it is not informative."""
    inverse = D / tl.where(informative, weight_sum, 1.0)  # one float64 division for all features
    return tl.where(informative, clamp_to_float32(weight * inverse), 1.0)


@triton.jit
def clamp_to_float32(scale):
    """Clamp to the normal numbers of float32."""
    return tl.minimum(tl.maximum(scale, TINY), HUGE)
