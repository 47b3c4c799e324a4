"""Causal (prefix) statistics as running sums: each token reads those of its own cluster.

    dispersion (B, L, D)   of a token's cluster, over the tokens of its sequence up to and including
                           itself, and their count (B, L)
    scale (B, L, D)        1/s, mean one, of that dispersion shrunk towards a running average
                           (`shrunk` in ../prefix/shrinking.py)

The tokens of each cluster of each sequence are listed in time order (lists.py). A program owns a
block of features of one list. Its threads walk the list token by token and carry two running sums
of their own features, so that they exchange nothing. Sums are relative to the mean so far or,
without one, to the cluster's first token, and every STEP tokens they are added to a total, which
loses fewer digits. The grouping of additions depends only on a token's position within its own
cluster, so neither later tokens nor other clusters can change a bit of an earlier result.

A scale needs means over all features, so `_walk_kernel` writes s, and `_row_kernel` replaces it by
the scale, row by row: 28 and 25 us at switch in sequences of 512 tokens, 134 and 149 us at olmoe in
sequences of 2,048 (H200, captured, a script that was not kept; a copy of their bytes takes 12 and
16, 96 and 128). One kernel whose programs own all features of a list took more than both together,
because its threads wait for each other at every token.

Memory traffic: x read once, (B, L, D) float32 written, and once more read and written for a scale.
C (C, D) moments of each sequence are read and written.

B sequences of L tokens, D features, C clusters; S = B (C + 1) token lists, the last one of each
sequence for tokens in no cluster.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.ops.statistics.triton.epilogue import HUGE, NON_FINITE_SUM, TINY
from acmoe.ops.statistics.triton.lists import TokenLists

STEP = tl.constexpr(64)  # tokens whose terms are added up before they enter the total
# A weight relative to that of the mean s is at most the reciprocal of this, so that no sum of
# weights overflows float32.
LEAST_RATIO = tl.constexpr(1e-30)
FEATURES = 128  # most of a program that walks a list, two for each thread
ROW_ELEMENTS = 512  # of each warp that computes scales, and at least of a program


class Shrinking(NamedTuple):
    """The running average that the dispersions are shrunk towards, and the options of the scale."""

    average: Tensor  # (C, D) float32
    weight: Tensor  # (C,) float32 tokens in it; below min_tokens it is not read
    prior_tokens: float
    floor: float
    eps: float
    min_tokens: int


def running_dispersion(
    x_BLD: Tensor, lists: TokenLists, before: PrefixMoments, after: PrefixMoments, measure: str
) -> tuple[Tensor, Tensor]:
    """Return dispersion (B, L, D) and count (B, L) at each token, and write the moments `after`.

    A token in no list but the last of its sequence has zeros.
    """
    none = Shrinking(before.mean, before.tokens, 0.0, 0.0, 0.0, 0)
    return _walk((x_BLD, lists, before, after), none, measure, shrinks=False)


def running_scale(
    x_BLD: Tensor,
    lists: TokenLists,
    before: PrefixMoments,
    after: PrefixMoments,
    shrinking: Shrinking,
    measure: str,
) -> Tensor:
    """Return the scale (B, L, D) at each token, and write the moments `after`.

    A token in no list but the last of its sequence has ones.
    """
    out_BLD, count_BL = _walk((x_BLD, lists, before, after), shrinking, measure, shrinks=True)
    D = x_BLD.shape[2]
    width = next_power_of_2(D)
    rows = max(1, ROW_ELEMENTS // width)
    launch(
        _row_kernel, (cdiv(count_BL.numel(), rows),), out_BLD, count_BL, count_BL.numel(), D,
        shrinking.floor, shrinking.eps, shrinking.min_tokens, BT=rows, BD=width,
        num_warps=min(16, max(1, width // ROW_ELEMENTS)),
    )  # fmt: skip
    return out_BLD


def _walk(
    tokens: tuple[Tensor, TokenLists, PrefixMoments, PrefixMoments],
    shrinking: Shrinking,
    measure: str,
    *,
    shrinks: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `_walk_kernel` writes for each token, (B, L, D), and the counts (B, L)."""
    x_BLD, lists, before, after = tokens
    out_BLD = before.mean.new_empty(x_BLD.shape)
    count_BL = out_BLD.new_empty(x_BLD.shape[:2])
    S, D, C = lists.begin.numel() - 1, x_BLD.shape[2], before.tokens.shape[1]
    average, weight, prior_tokens, _, _, min_tokens = shrinking
    features = min(FEATURES, next_power_of_2(D))
    launch(
        _walk_kernel, (S, cdiv(D, features)), x_BLD, *lists, *before, *after, average, weight,
        out_BLD, count_BL, D, C, prior_tokens, min_tokens, MEASURE=measure, SHRINKS=shrinks,
        BD=features, num_warps=max(1, features // 64),
    )  # fmt: skip
    return out_BLD, count_BL


@triton.jit
def _load_tokens(token_ptr, slot, last):
    """Return the tokens in four slots of a list, and how many of them are in it."""
    a = tl.load(token_ptr + slot, mask=slot < last, other=0).to(tl.int64)
    b = tl.load(token_ptr + slot + 1, mask=slot + 1 < last, other=0).to(tl.int64)
    c = tl.load(token_ptr + slot + 2, mask=slot + 2 < last, other=0).to(tl.int64)
    e = tl.load(token_ptr + slot + 3, mask=slot + 3 < last, other=0).to(tl.int64)
    return a, b, c, e, last - slot


@triton.jit
def _load_rows(x_ptr, tokens, d, D):
    """Return the features of four tokens; zeros for those that are not in the list."""
    a, b, c, e, number = tokens
    return (
        tl.load(x_ptr + a * D + d, mask=d < tl.where(number > 0, D, 0), other=0.0),
        tl.load(x_ptr + b * D + d, mask=d < tl.where(number > 1, D, 0), other=0.0),
        tl.load(x_ptr + c * D + d, mask=d < tl.where(number > 2, D, 0), other=0.0),
        tl.load(x_ptr + e * D + d, mask=d < tl.where(number > 3, D, 0), other=0.0),
    )


@triton.jit
def _pass(
    x, token, inside, count, anchor, sums, before, prior, average, out_ptr, count_ptr, d, D,
    MEASURE: tl.constexpr, SHRINKS: tl.constexpr,
):  # fmt: skip
    """Store the statistics at one token, and return the sums with its terms.

    sums: those of x and of the measure since `before`, the totals. count: tokens up to this one.
    inside: False if there is no such token, which changes no sum.
    """
    sum_x, sum_terms = sums
    y = tl.where(inside, x.to(tl.float32) - anchor, 0.0)
    sum_x += y
    deviation = y - (before[0] + sum_x) / count
    if MEASURE == "mad":
        term = tl.abs(deviation)
    else:
        term = deviation * deviation * (count / tl.maximum(count - 1.0, 1.0))
    sum_terms += tl.where(inside, term, 0.0)
    s = (before[1] + sum_terms) / count
    if MEASURE == "std":
        s = tl.sqrt(s)
    if SHRINKS:
        # A single token has dispersion 0, which carries no information.
        seen = tl.where(count >= 2, count, 0.0)
        count = seen + prior
        s = (seen * s + prior * average) / tl.maximum(count, 1.0)
    tl.store(out_ptr + token * D + d, s, mask=d < tl.where(inside, D, 0))
    if tl.program_id(1) == 0:
        tl.store(count_ptr + token, count, mask=inside)
    return sum_x, sum_terms


@triton.jit
def _walk_kernel(
    x_ptr, token_ptr, begin_ptr, tokens_ptr, mean_ptr, spread_ptr, tokens_after_ptr,
    mean_after_ptr, spread_after_ptr, average_ptr, weight_ptr, out_ptr, count_ptr, D, C,
    prior_tokens, min_tokens, MEASURE: tl.constexpr, SHRINKS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Walk one list of tokens, four at a time, and store s and the count at each.

    SHRINKS: s is shrunk towards the running average, and the count is that of both. The rows of the
    next four tokens are loaded ahead, and the indices of the four after them.
    """
    list_id = tl.program_id(0)
    cluster = list_id % (C + 1)
    first, last = tl.load(begin_ptr + list_id), tl.load(begin_ptr + list_id + 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    valid = d < D
    zeros = tl.zeros((BD,), dtype=tl.float32)
    if cluster == C:
        for slot in range(first, last):
            token = tl.load(token_ptr + slot).to(tl.int64)
            tl.store(out_ptr + token * D + d, zeros, mask=valid)
            if tl.program_id(1) == 0:
                tl.store(count_ptr + token, 0.0)
        return
    tokens = _load_tokens(token_ptr, first, last)
    next_tokens = _load_tokens(token_ptr, first + 4, last)
    row = (list_id // (C + 1)).to(tl.int64) * C + cluster
    tokens_before = tl.load(tokens_ptr + row)
    anchor = tl.load(mean_ptr + row * D + d, mask=valid, other=0.0)
    spread = tl.load(spread_ptr + row * D + d, mask=valid, other=0.0)
    x = _load_rows(x_ptr, tokens, d, D)
    if (tokens_before == 0) & (last > first):
        anchor = x[0].to(tl.float32)
    prior, average = 0.0, zeros
    if SHRINKS:
        prior = tl.where(tl.load(weight_ptr + cluster) >= min_tokens, prior_tokens, 0.0)
        average = tl.load(average_ptr + cluster * D + d, mask=valid, other=0.0)
    total, sum_x, sum_terms = zeros, zeros, zeros
    for slot in range(first, last, 4):
        next_x = _load_rows(x_ptr, next_tokens, d, D)
        later = _load_tokens(token_ptr, slot + 8, last)
        count = tokens_before + (slot - first + 1).to(tl.float32)
        before = total, spread
        for i in tl.static_range(4):
            sum_x, sum_terms = _pass(
                x[i], tokens[i], tokens[4] > i, count + i, anchor, (sum_x, sum_terms), before,
                prior, average, out_ptr, count_ptr, d, D, MEASURE, SHRINKS,
            )  # fmt: skip
        x, tokens, next_tokens = next_x, next_tokens, later
        if (slot - first) % STEP == STEP - 4:
            total, spread, sum_x, sum_terms = total + sum_x, spread + sum_terms, zeros, zeros
    total, spread = total + sum_x, spread + sum_terms
    tokens_after = tokens_before + (last - first).to(tl.float32)
    mean = anchor + total / tl.maximum(tokens_after, 1.0)
    tl.store(mean_after_ptr + row * D + d, mean, mask=valid)
    tl.store(spread_after_ptr + row * D + d, spread, mask=valid)
    if tl.program_id(1) == 0:
        tl.store(tokens_after_ptr + row, tokens_after)


@triton.jit
def _row_kernel(
    scale_ptr, count_ptr, N, D, floor, eps, min_tokens, BT: tl.constexpr, BD: tl.constexpr
):
    """Replace the dispersions of BT tokens by their scales: 1/s over its mean.

    A token with too few tokens, or without a positive, finite mean, gets ones. float64 holds what
    may leave the range of float32; scale.py defines the result.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    offs = t.to(tl.int64)[:, None] * D + d[None, :]
    real = d[None, :] < D
    valid = (t < N)[:, None] & real
    s = tl.load(scale_ptr + offs, mask=valid, other=0.0).to(tl.float64)
    count = tl.load(count_ptr + t, mask=t < N, other=0.0)
    mean = tl.sum(s, axis=1) / D
    informative = (count >= min_tokens) & (mean < NON_FINITE_SUM) & ((eps > 0) | (mean > 0))
    inverse = 1.0 / tl.where(informative, mean + eps, 1.0)
    ratio = (tl.maximum(s, floor * mean[:, None]) + eps) * inverse[:, None]
    ratio = tl.where(informative[:, None] & real, ratio.to(tl.float32), 1.0)
    weight = 1.0 / tl.maximum(ratio, LEAST_RATIO)
    total = tl.sum(tl.where(real, weight, 0.0), axis=1)
    scale = tl.minimum(tl.maximum(weight * (D / total)[:, None], TINY), HUGE)
    tl.store(scale_ptr + offs, tl.where(informative[:, None], scale, 1.0), mask=valid)
