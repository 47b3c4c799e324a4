"""Causal (prefix) dispersion as running sums: the Triton form of ../prefix.py for J = 1, where each
token reads the statistics of its own cluster.

    out (B, L, D) and count (B, L): dispersion and size of a token's cluster, over the tokens of its
    sequence up to and including itself

Each sequence's tokens are grouped by cluster in time order (a stable sort of integers). A program
owns one cluster of one sequence and a block of features; it walks that token list tile by tile and
carries two running sums. The grouping of additions depends only on a token's position within its
own cluster, so neither later tokens nor other clusters can change a bit of an earlier result. As in
the reference, sums are relative to the mean so far or, without one, to the cluster's first token.

Memory traffic: x read once (B L D itemsize bytes), (B, L, D) float32 written.

B sequences of L tokens, D features, C clusters; S = B (C + 1) token lists, the last one of each
sequence for tokens in no cluster.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Tile sizes (BT tokens, BD features) and warps."""

    tokens: int
    features: int
    num_warps: int


def launch_table(length: int, num_clusters: int) -> Tile:
    """Choose the tile: short token lists take short tiles."""
    return Tile(16 if length // num_clusters <= 32 else 64, 64, 4)


def running_dispersion(
    x_BLD: Tensor,
    cluster_BL: Tensor,
    tokens_BC: Tensor,
    mean_BCD: Tensor,
    spread_BCD: Tensor,
    measure: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dispersion (B, L, D) and count (B, L) at each token, and the three moments afterwards.

    cluster_BL: C or more for a token in no cluster; its dispersion and count are zeros.
    tokens_BC, mean_BCD, spread_BCD: the moments of earlier calls (`PrefixMoments`).
    """
    B, L, D = x_BLD.shape
    C = tokens_BC.shape[1]
    x_BLD = x_BLD.contiguous()
    device = x_BLD.device
    offset_B1 = torch.arange(B, device=device)[:, None] * (C + 1)
    key_N = (cluster_BL.clamp(max=C) + offset_B1).flatten()
    sorted_key_N, permutation_N = key_N.sort(stable=True)
    bounds = torch.searchsorted(sorted_key_N, torch.arange(B * (C + 1) + 1, device=device))
    out_BLD = x_BLD.new_empty(B, L, D, dtype=torch.float32)
    count_BL = out_BLD.new_empty(B, L)
    after = tuple(torch.empty_like(moment) for moment in (tokens_BC, mean_BCD, spread_BCD))
    tile = launch_table(L, C)
    _running_kernel[(B * (C + 1), triton.cdiv(D, tile.features))](
        x_BLD, permutation_N, bounds, tokens_BC.contiguous(), mean_BCD.contiguous(),
        spread_BCD.contiguous(), out_BLD, count_BL, *after, D, C, MEASURE=measure, BT=tile.tokens,
        BD=tile.features, num_warps=tile.num_warps,
    )  # fmt: skip
    return out_BLD, count_BL, *after


@triton.jit
def _running_kernel(
    x_ptr, perm_ptr, bounds_ptr, tokens_ptr, mean_ptr, spread_ptr, out_ptr, count_ptr,
    tokens_after_ptr, mean_after_ptr, spread_after_ptr, D, C, MEASURE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    list_id = tl.program_id(0)
    first = tl.load(bounds_ptr + list_id)
    last = tl.load(bounds_ptr + list_id + 1)
    cluster = list_id % (C + 1)
    in_cluster = cluster < C
    # Tokens in no cluster read the last cluster's moments, and do not store any.
    row = (list_id // (C + 1)).to(tl.int64) * C + tl.minimum(cluster, C - 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    valid = d < tl.where(in_cluster, D, 0)
    tokens_before = tl.load(tokens_ptr + row)
    anchor = tl.load(mean_ptr + row * D + d, mask=valid, other=0.0)
    if (tokens_before == 0) & (last > first):
        anchor = tl.load(x_ptr + tl.load(perm_ptr + first) * D + d, mask=valid, other=0.0)
        anchor = anchor.to(tl.float32)
    spread = tl.load(spread_ptr + row * D + d, mask=valid, other=0.0)
    sum_x = tl.zeros((BD,), dtype=tl.float32)
    for start in range(first, last, BT):
        slot = start + tl.arange(0, BT)
        token = tl.load(perm_ptr + slot, mask=slot < last, other=0)
        count = tokens_before + (slot - first + 1).to(tl.float32)
        inside = (slot < last)[:, None] & (d < D)[None, :]
        offs = token[:, None] * D + d[None, :]
        x = tl.load(x_ptr + offs, mask=inside & valid[None, :], other=0.0).to(tl.float32)
        x = tl.where(inside, x - anchor[None, :], 0.0)
        count_TD = tl.broadcast_to(count[:, None], (BT, BD))
        deviation = x - tl.div_rn(sum_x[None, :] + tl.cumsum(x, axis=0), count_TD)
        if MEASURE == "mad":
            increment = tl.abs(deviation)
        else:
            increment = deviation * deviation * tl.div_rn(count_TD, tl.maximum(count_TD - 1.0, 1.0))
        increment = tl.where(inside, increment, 0.0)
        result = tl.div_rn(spread[None, :] + tl.cumsum(increment, axis=0), count_TD)
        if MEASURE == "std":
            result = tl.sqrt(result)
        tl.store(out_ptr + offs, tl.where(in_cluster, result, 0.0), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(count_ptr + token, tl.where(in_cluster, count, 0.0), mask=slot < last)
        sum_x += tl.sum(x, axis=0)
        spread += tl.sum(increment, axis=0)
    tokens_after = tokens_before + (last - first).to(tl.float32)
    mean = anchor + sum_x / tl.maximum(tokens_after, 1.0)
    tl.store(mean_after_ptr + row * D + d, mean, mask=valid)
    tl.store(spread_after_ptr + row * D + d, spread, mask=valid)
    if in_cluster and tl.program_id(1) == 0:
        tl.store(tokens_after_ptr + row, tokens_after)
