"""Interquartile range of every cluster and feature (B, C, D), exact, without sorting any feature.

The tokens of a cluster are listed once (a sort of T integers). A program owns one cluster and a
block of features and finds both quartiles by radix selection: float bit patterns are mapped to
integers of the same order, and the answer is narrowed by two bits per round by counting the values
below three candidates. That takes 8 rounds for 16-bit tokens and 16 for float32, then one more for
the next order statistic, which linear interpolation needs. Counts are integers: exact, and the same
in every run.

Memory traffic: x read once from memory, B T D itemsize bytes; later rounds find a cluster's block
in the caches (512 tokens x 32 features x 2 bytes = 32 KB).

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
    """Return the interquartile range (B, C, D) and the token count (B, C), both float32.

    cluster_BT: C or more for a token in no cluster. A non-finite token makes its cluster's range
    NaN.
    """
    B, T, D = x_BTD.shape
    if T == 0:
        count_BC = x_BTD.new_zeros(B, num_clusters, dtype=torch.float32)
        return count_BC[..., None].repeat(1, 1, D), count_BC
    x_BTD = x_BTD.contiguous()
    segments = B * num_clusters
    offset_B1 = torch.arange(B, device=x_BTD.device)[:, None] * num_clusters
    inside_BT = cluster_BT < num_clusters
    key_N = torch.where(inside_BT, cluster_BT + offset_B1, segments).flatten()
    sorted_key_N, permutation_N = key_N.sort(stable=True)
    bounds = torch.searchsorted(sorted_key_N, torch.arange(segments + 1, device=x_BTD.device))
    iqr_BCD = x_BTD.new_empty(B, num_clusters, D, dtype=torch.float32)
    blocks = triton.cdiv(D, FEATURES)
    non_finite_NS = x_BTD.new_empty(blocks, segments, dtype=torch.int32)
    _quartile_kernel[(segments, blocks)](
        x_BTD, permutation_N, bounds, iqr_BCD, non_finite_NS, D, segments,
        BITS=8 * x_BTD.element_size(), BT=TOKENS, BD=FEATURES, num_warps=WARPS,
    )  # fmt: skip
    non_finite_BC1 = (non_finite_NS.sum(0) > 0).view(B, num_clusters, 1)
    count_BC = bounds.diff().view(B, num_clusters).to(torch.float32)
    return iqr_BCD.masked_fill(non_finite_BC1, torch.nan), count_BC


@triton.jit
def _load_keys(x_ptr, perm_ptr, slot, last, d, D, BITS: tl.constexpr):
    """Load a tile of tokens as sortable integer keys, as values, and its in-bounds mask."""
    token = tl.load(perm_ptr + slot, mask=slot < last, other=0)
    valid = (slot < last)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=valid, other=0.0)
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
    return _sortable(bits, BITS), x, valid


@triton.jit
def _sortable(bits, BITS: tl.constexpr):
    """Map float bit patterns to integers of the same order; the map is its own inverse."""
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def _key_to_float(key, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return the float32 value of a sortable key."""
    bits = _sortable(key, BITS)
    if BITS == 16:
        bits = bits.to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _narrow(
    x_ptr, perm_ptr, first, last, d, D, low, step, rank, BITS: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Raise `low` by 0 to 3 steps: to the largest key with at most `rank` values below it."""
    below_1 = tl.zeros((BT, BD), dtype=tl.int32)
    below_2 = tl.zeros((BT, BD), dtype=tl.int32)
    below_3 = tl.zeros((BT, BD), dtype=tl.int32)
    # Add step by step: 2 * 2^30 does not fit an int32, but low + 2^30 + 2^30 does.
    low_2 = low + step + step
    for start in range(first, last, BT):
        slot = start + tl.arange(0, BT)
        key, _, valid = _load_keys(x_ptr, perm_ptr, slot, last, d, D, BITS)
        below_1 += (valid & (key < (low + step)[None, :])).to(tl.int32)
        below_2 += (valid & (key < low_2[None, :])).to(tl.int32)
        below_3 += (valid & (key < (low_2 + step)[None, :])).to(tl.int32)
    found = tl.where(tl.sum(below_1, axis=0) <= rank, low + step, low)
    found = tl.where(tl.sum(below_2, axis=0) <= rank, low_2, found)
    return tl.where(tl.sum(below_3, axis=0) <= rank, low_2 + step, found)


@triton.jit
def _quantile(
    x_ptr, perm_ptr, first, last, d, D, SHARE: tl.constexpr, BITS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the value below the quantile at SHARE, and the distance from it to the quantile.

    Third, return the number of non-finite values.
    """
    span = tl.maximum(last - first - 1, 0)
    position = span.to(tl.float32) * SHARE
    rank = tl.floor(position).to(tl.int32)
    low = tl.zeros((BD,), dtype=tl.int32) - (1 << (BITS - 2)) - (1 << (BITS - 2))
    step = tl.full((), 1 << (BITS - 2), dtype=tl.int32)
    for _ in range(0, BITS // 2):
        low = _narrow(x_ptr, perm_ptr, first, last, d, D, low, step, rank, BITS, BT, BD)
        step = step >> 2
    at_most = tl.zeros((BT, BD), dtype=tl.int32)
    above = tl.full((BT, BD), 0x7FFFFFFF, dtype=tl.int32)
    non_finite = tl.zeros((BT, BD), dtype=tl.int32)
    for start in range(first, last, BT):
        slot = start + tl.arange(0, BT)
        key, x, valid = _load_keys(x_ptr, perm_ptr, slot, last, d, D, BITS)
        at_most += (valid & (key <= low[None, :])).to(tl.int32)
        above = tl.minimum(above, tl.where(valid & (key > low[None, :]), key, 0x7FFFFFFF))
        finite = tl.abs(x.to(tl.float32)) < float("inf")
        non_finite += (valid & (finite == 0)).to(tl.int32)
    needs_next = (tl.sum(at_most, axis=0) < rank + 2) & (rank < span)
    high = tl.where(needs_next, tl.min(above, axis=0), low)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    lower = _key_to_float(low, dtype, BITS)
    fraction = position - rank.to(tl.float32)
    above = fraction * (_key_to_float(high, dtype, BITS) - lower)
    return lower, above, tl.sum(non_finite)


@triton.jit
def _quartile_kernel(
    x_ptr, perm_ptr, bounds_ptr, iqr_ptr, non_finite_ptr, D, segments, BITS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.load(bounds_ptr + segment).to(tl.int32)
    last = tl.load(bounds_ptr + segment + 1).to(tl.int32)
    low, above_low, non_finite = _quantile(x_ptr, perm_ptr, first, last, d, D, 0.25, BITS, BT, BD)
    high, above_high, _ = _quantile(x_ptr, perm_ptr, first, last, d, D, 0.75, BITS, BT, BD)
    # Differences are added up: a quantile would be rounded as its values are, see `reference.iqr`.
    iqr = tl.where(last > first, (high - low) + (above_high - above_low), 0.0)
    tl.store(iqr_ptr + segment.to(tl.int64) * D + d, iqr, mask=d < D)
    tl.store(non_finite_ptr + tl.program_id(1) * segments + segment, non_finite)
