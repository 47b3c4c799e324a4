"""Exact order statistics of every cluster and feature, without sorting a single feature.

The tokens of a cluster are listed once (a sort of T integers). A program owns one cluster and a
block of features and finds the quartiles bit by bit: float bit patterns, reordered so that they
compare as integers, are narrowed two bits a round by counting how many values lie below three
candidates. 8 rounds for 16-bit tokens, 16 for float32, then one more for the neighbour that linear
interpolation needs. Counts are integers: exact, and the same in every run.

Floor: x read once from memory, B T D itemsize bytes; the later rounds find a cluster's block in the
caches (512 tokens x 32 features x 2 bytes = 32 KB).

B sets of T tokens, D features, C clusters; S = B C segments of the token list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, FEATURES, WARPS = 64, 32, 4


def interquartile_range(
    x_BTD: Tensor, cluster_BT: Tensor, num_clusters: int
) -> tuple[Tensor, Tensor]:
    """(B, C, D) and the float32 count (B, C). cluster_BT: C or more for a token in none."""
    B, T, D = x_BTD.shape
    if T == 0:
        count_BC = x_BTD.new_zeros(B, num_clusters, dtype=torch.float32)
        return count_BC[..., None].repeat(1, 1, D), count_BC
    x_BTD = x_BTD.contiguous()
    segments = B * num_clusters
    offset_B1 = torch.arange(B, device=x_BTD.device)[:, None] * num_clusters
    inside_BT = cluster_BT < num_clusters
    key_N = torch.where(inside_BT, cluster_BT + offset_B1, segments).flatten()
    ordered_N, order_N = key_N.sort(stable=True)
    bounds = torch.searchsorted(ordered_N, torch.arange(segments + 1, device=x_BTD.device))
    iqr_BCD = x_BTD.new_empty(B, num_clusters, D, dtype=torch.float32)
    blocks = triton.cdiv(D, FEATURES)
    bad_NS = x_BTD.new_empty(blocks, segments, dtype=torch.int32)
    _quartile_kernel[(segments, blocks)](
        x_BTD, order_N, bounds, iqr_BCD, bad_NS, D, segments, BITS=8 * x_BTD.element_size(),
        BT=TOKENS, BD=FEATURES, num_warps=WARPS,
    )  # fmt: skip
    spoiled_BC1 = (bad_NS.sum(0) > 0).view(B, num_clusters, 1)
    count_BC = bounds.diff().view(B, num_clusters).to(torch.float32)
    return iqr_BCD.masked_fill(spoiled_BC1, torch.nan), count_BC


@triton.jit
def _load_keys(x_ptr, order_ptr, place, last, d, D, BITS: tl.constexpr):
    """Values of the listed tokens as integers of the same order, and which of them exist."""
    token = tl.load(order_ptr + place, mask=place < last, other=0)
    known = (place < last)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=known, other=0.0)
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
    return _reorder(bits, BITS), x, known


@triton.jit
def _reorder(bits, BITS: tl.constexpr):
    """Float bit patterns to integers of the same order, and back: its own inverse."""
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def _value(key, dtype: tl.constexpr, BITS: tl.constexpr):
    """The float32 value of a key."""
    bits = _reorder(key, BITS)
    if BITS == 16:
        bits = bits.to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _narrow(
    x_ptr, order_ptr, first, last, d, D, low, step, rank, BITS: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """`low` raised by 0 to 3 steps: the greatest with at most `rank` values below it."""
    one = tl.zeros((BT, BD), dtype=tl.int32)
    two = tl.zeros((BT, BD), dtype=tl.int32)
    three = tl.zeros((BT, BD), dtype=tl.int32)
    # Added one by one: two steps of 2^30 do not fit an int32, the places they lead to do.
    second = low + step + step
    for start in range(first, last, BT):
        place = start + tl.arange(0, BT)
        key, _, known = _load_keys(x_ptr, order_ptr, place, last, d, D, BITS)
        one += (known & (key < (low + step)[None, :])).to(tl.int32)
        two += (known & (key < second[None, :])).to(tl.int32)
        three += (known & (key < (second + step)[None, :])).to(tl.int32)
    found = tl.where(tl.sum(one, axis=0) <= rank, low + step, low)
    found = tl.where(tl.sum(two, axis=0) <= rank, second, found)
    return tl.where(tl.sum(three, axis=0) <= rank, second + step, found)


@triton.jit
def _quantile(
    x_ptr, order_ptr, first, last, d, D, SHARE: tl.constexpr, BITS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The value a share of the way up, between order statistics; and how many are not finite."""
    span = tl.maximum(last - first - 1, 0)
    place = span.to(tl.float32) * SHARE
    rank = tl.floor(place).to(tl.int32)
    low = tl.zeros((BD,), dtype=tl.int32) - (1 << (BITS - 2)) - (1 << (BITS - 2))
    step = tl.full((), 1 << (BITS - 2), dtype=tl.int32)
    for _ in range(0, BITS // 2):
        low = _narrow(x_ptr, order_ptr, first, last, d, D, low, step, rank, BITS, BT, BD)
        step = step >> 2
    upto = tl.zeros((BT, BD), dtype=tl.int32)
    above = tl.full((BT, BD), 0x7FFFFFFF, dtype=tl.int32)
    bad = tl.zeros((BT, BD), dtype=tl.int32)
    for start in range(first, last, BT):
        at = start + tl.arange(0, BT)
        key, x, known = _load_keys(x_ptr, order_ptr, at, last, d, D, BITS)
        upto += (known & (key <= low[None, :])).to(tl.int32)
        above = tl.minimum(above, tl.where(known & (key > low[None, :]), key, 0x7FFFFFFF))
        finite = tl.abs(x.to(tl.float32)) < float("inf")
        bad += (known & (finite == 0)).to(tl.int32)
    alone = (tl.sum(upto, axis=0) < rank + 2) & (rank < span)
    high = tl.where(alone, tl.min(above, axis=0), low)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    lower = _value(low, dtype, BITS)
    share = place - rank.to(tl.float32)
    return lower + share * (_value(high, dtype, BITS) - lower), tl.sum(bad)


@triton.jit
def _quartile_kernel(
    x_ptr, order_ptr, bounds_ptr, iqr_ptr, bad_ptr, D, segments, BITS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.load(bounds_ptr + segment).to(tl.int32)
    last = tl.load(bounds_ptr + segment + 1).to(tl.int32)
    lower, bad = _quantile(x_ptr, order_ptr, first, last, d, D, 0.25, BITS, BT, BD)
    upper, _ = _quantile(x_ptr, order_ptr, first, last, d, D, 0.75, BITS, BT, BD)
    iqr = tl.where(last > first, upper - lower, 0.0)
    tl.store(iqr_ptr + segment.to(tl.int64) * D + d, iqr, mask=d < D)
    tl.store(bad_ptr + tl.program_id(1) * segments + segment, bad)
