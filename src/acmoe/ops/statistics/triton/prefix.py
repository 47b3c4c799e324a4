"""Causal dispersion as running sums: the Triton form of ../prefix.py, each token reading its own
cluster.

The tokens of every sequence are listed by cluster, in order of time (a sort of integers). A program
owns one cluster of one sequence and a block of features, walks its list a tile at a time and
carries two sums. How additions are grouped depends only on a token's place among the tokens of its
own cluster, so neither later tokens nor other clusters can change a bit of an earlier result. As in
the reference, sums run relative to the mean so far, or else to the cluster's first token.

Floor: x read once (B L D itemsize bytes), (B, L, D) float32 written.

B sequences of L tokens, D features, C clusters; S = B (C + 1) lists, the last of each sequence for
tokens that count nowhere.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    tokens: int
    features: int
    num_warps: int


def launch_table(length: int, num_clusters: int) -> Tile:
    """Short lists, short tiles."""
    return Tile(16 if length // num_clusters <= 32 else 64, 64, 4)


def running_dispersion(
    x_BLD: Tensor,
    cluster_BL: Tensor,
    tokens_BC: Tensor,
    mean_BCD: Tensor,
    spread_BCD: Tensor,
    measure: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Dispersion (B, L, D) and count (B, L) as seen at each token, and the moments afterwards.

    cluster_BL: C or more for a token that counts nowhere; its results are zeros.
    """
    B, L, D = x_BLD.shape
    C = tokens_BC.shape[1]
    x_BLD = x_BLD.contiguous()
    device = x_BLD.device
    offset_B1 = torch.arange(B, device=device)[:, None] * (C + 1)
    key_N = (cluster_BL.clamp(max=C) + offset_B1).flatten()
    ordered_N, order_N = key_N.sort(stable=True)
    bounds = torch.searchsorted(ordered_N, torch.arange(B * (C + 1) + 1, device=device))
    out_BLD = x_BLD.new_empty(B, L, D, dtype=torch.float32)
    count_BL = out_BLD.new_empty(B, L)
    after = tuple(torch.empty_like(moment) for moment in (tokens_BC, mean_BCD, spread_BCD))
    tile = launch_table(L, C)
    _running_kernel[(B * (C + 1), triton.cdiv(D, tile.features))](
        x_BLD, order_N, bounds, tokens_BC.contiguous(), mean_BCD.contiguous(),
        spread_BCD.contiguous(), out_BLD, count_BL, *after, D, C, MEASURE=measure, BT=tile.tokens,
        BD=tile.features, num_warps=tile.num_warps,
    )  # fmt: skip
    return out_BLD, count_BL, *after


@triton.jit
def _running_kernel(
    x_ptr, order_ptr, bounds_ptr, tokens_ptr, mean_ptr, spread_ptr, out_ptr, count_ptr,
    tokens_after_ptr, mean_after_ptr, spread_after_ptr, D, C, MEASURE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    listed = tl.program_id(0)
    first = tl.load(bounds_ptr + listed)
    last = tl.load(bounds_ptr + listed + 1)
    cluster = listed % (C + 1)
    counts = cluster < C
    # Tokens that count nowhere borrow the last cluster's moments and leave them alone.
    row = (listed // (C + 1)).to(tl.int64) * C + tl.minimum(cluster, C - 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    known = d < tl.where(counts, D, 0)
    earlier = tl.load(tokens_ptr + row)
    anchor = tl.load(mean_ptr + row * D + d, mask=known, other=0.0)
    if (earlier == 0) & (last > first):
        anchor = tl.load(x_ptr + tl.load(order_ptr + first) * D + d, mask=known, other=0.0)
        anchor = anchor.to(tl.float32)
    spread = tl.load(spread_ptr + row * D + d, mask=known, other=0.0)
    moved = tl.zeros((BD,), dtype=tl.float32)
    for start in range(first, last, BT):
        place = start + tl.arange(0, BT)
        token = tl.load(order_ptr + place, mask=place < last, other=0)
        seen = earlier + (place - first + 1).to(tl.float32)
        inside = (place < last)[:, None] & (d < D)[None, :]
        at = token[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=inside & known[None, :], other=0.0).to(tl.float32)
        x = tl.where(inside, x - anchor[None, :], 0.0)
        seen_TD = tl.broadcast_to(seen[:, None], (BT, BD))
        away = x - tl.div_rn(moved[None, :] + tl.cumsum(x, axis=0), seen_TD)
        if MEASURE == "mad":
            step = tl.abs(away)
        else:
            step = away * away * tl.div_rn(seen_TD, tl.maximum(seen_TD - 1.0, 1.0))
        step = tl.where(inside, step, 0.0)
        result = tl.div_rn(spread[None, :] + tl.cumsum(step, axis=0), seen_TD)
        if MEASURE == "std":
            result = tl.sqrt(result)
        tl.store(out_ptr + at, tl.where(counts, result, 0.0), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(count_ptr + token, tl.where(counts, seen, 0.0), mask=place < last)
        moved += tl.sum(x, axis=0)
        spread += tl.sum(step, axis=0)
    tokens = earlier + (last - first).to(tl.float32)
    mean = anchor + moved / tl.maximum(tokens, 1.0)
    tl.store(mean_after_ptr + row * D + d, mean, mask=known)
    tl.store(spread_after_ptr + row * D + d, spread, mask=known)
    if counts and tl.program_id(1) == 0:
        tl.store(tokens_after_ptr + row, tokens)
