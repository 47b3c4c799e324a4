"""Sums per cluster in two passes over the tokens: the Triton form of ops/statistics/reference.py.

A sum over the tokens of each cluster is a product with a one-hot matrix, which the matrix units do
in float32: no sorting, no atomics, the same bits in every run, and no slower when one cluster holds
every token. Each program owns (a split of the tokens) x (a block of features) x (a block of
clusters) and writes one partial sum.

    pass 1   sums of x, and tokens per cluster     floor: x read once, B T D itemsize bytes
    pass 2   sums of |x - mean| or (x - mean)^2    floor: the same again
The (P, C, D) float32 partials are small beside x; scale.py turns them into dispersions.

Precision. A 16-bit token enters pass 1 as it is: while the values of a feature share one binade
and a split has at most 2^16 tokens (bf16; 2^13 in fp16) every sum is exact, so a large common
offset costs nothing. A float32 token is taken relative to the first token of its cluster in the
split, as the reference does. What enters the matrix units from float32 is cut into two bf16
numbers: a relative error of 2^-18 a term, of random sign.

B sets of T tokens, D features, C clusters, P splits of each set.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import as_number, dot, dot_in_two

# Two programs on each of an H200's 132 multiprocessors. A constant, not a property of the device:
# the number of splits decides the order of additions, and the card should not change a result.
PROGRAMS = 264
MAX_SPLITS = 32  # each program of pass 2 begins by adding up this many partial sums
# Stands for a term that is not finite: within bf16's range, and far above any dispersion. Unlike
# NaN it stays in its own cluster when multiplied by the zeros of a one-hot matrix.
POISON = tl.constexpr(3.38e38)


class Tile(NamedTuple):
    """Block sizes of both passes, and for each its warps and how many loads ahead it runs."""

    tokens: int
    features: int
    clusters: int
    warps: tuple[int, int]
    stages: tuple[int, int]


def launch_table(num_clusters: int, dim: int) -> Tile:
    """Narrow models take narrow blocks, so that there are programs enough.

    Pass 2 holds a term, a mean and a pointer of every number of its block: with 4 warps 200
    registers a thread let a multiprocessor run 8 warps, with 8 warps 128 let it run 16.
    """
    clusters = max(16, min(128, triton.next_power_of_2(num_clusters)))
    features = 64 if dim >= 1024 else 32
    least = 8 if clusters == 128 else 4
    return Tile(
        64, features, clusters, warps=(least, 8 if features == 64 else least), stages=(3, 3)
    )


def split_tokens(
    num_tokens: int,
    programs_per_split: int,
    block: int,
    programs: int = PROGRAMS,
    most: int = MAX_SPLITS,
) -> tuple[int, int]:
    """How many splits, and the tokens of each: a multiple of the block."""
    wanted = max(programs // programs_per_split, triton.cdiv(num_tokens, 4096))
    splits = max(1, min(wanted, most, triton.cdiv(num_tokens, block)))
    size = triton.cdiv(triton.cdiv(max(num_tokens, 1), splits), block) * block
    return max(1, triton.cdiv(num_tokens, size)), size


class Partials(NamedTuple):
    """What the two passes leave behind."""

    spread: Tensor  # (B, P, C, D) float32 sums of the measure's terms
    count: Tensor  # (B, P, C) int32 tokens
    mean: Tensor  # (B, C, D) float32 mean of each cluster


def partial_sums(
    x_BTD: Tensor, assignment_BT: Tensor, mask_BT: Tensor | None, num_clusters: int, measure: str
) -> Partials:
    """Both passes. measure: mad, square, or sign (the sum of signs: the slope of mad)."""
    B, T, D = x_BTD.shape
    tile = launch_table(num_clusters, D)
    blocks = triton.cdiv(D, tile.features), triton.cdiv(num_clusters, tile.clusters)
    P, split = split_tokens(T, B * blocks[0] * blocks[1], tile.tokens)
    sums_BPCD = x_BTD.new_empty(B, P, num_clusters, D, dtype=torch.float32)
    spread_BPCD = torch.empty_like(sums_BPCD)
    count_BPC = x_BTD.new_empty(B, P, num_clusters, dtype=torch.int32)
    first_BPC = torch.empty_like(count_BPC)
    mean_BCD = x_BTD.new_empty(B, num_clusters, D, dtype=torch.float32)

    x_BTD, assignment_BT = x_BTD.contiguous(), assignment_BT.contiguous()
    mask = assignment_BT if mask_BT is None else mask_BT.contiguous().view(torch.uint8)
    anchored = x_BTD.dtype == torch.float32
    tokens = (assignment_BT, mask, count_BPC, first_BPC)
    shape = {"T": T, "C": num_clusters, "P": P, "split": split, "HAS_MASK": mask_BT is not None}
    shape |= {"BT": tile.tokens, "BC": tile.clusters}
    first, second = (
        {"num_warps": warps, "num_stages": stages}
        for warps, stages in zip(tile.warps, tile.stages, strict=True)
    )
    if anchored:
        _census_kernel[(B * P, 1, blocks[1])](*tokens, **shape, **first)
    shape |= {"D": D, "BD": tile.features, "ANCHORED": anchored}
    # Without anchors nothing needs the census yet: it is one more block beside the features.
    grid = (B * P, blocks[0] + (0 if anchored else 1), blocks[1])
    _sums_kernel[grid](x_BTD, *tokens, sums_BPCD, **shape, **first)
    results = sums_BPCD, mean_BCD, spread_BPCD
    _deviations_kernel[(B * P, *blocks)](
        x_BTD, *tokens, *results, **shape, MEASURE=measure, **second
    )
    return Partials(spread_BPCD, count_BPC, mean_BCD)


@triton.jit
def load_cluster(assignment_ptr, mask_ptr, row, inside, HAS_MASK: tl.constexpr):
    """Cluster of each token of these rows, -1 for one that counts nowhere."""
    cluster = tl.load(assignment_ptr + row, mask=inside, other=-1)
    if HAS_MASK:
        cluster = tl.where(tl.load(mask_ptr + row, mask=inside, other=0) != 0, cluster, -1)
    return cluster.to(tl.int32)


@triton.jit
def _census(
    assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Tokens of each cluster in this program's split, and the first of them."""
    part = tl.program_id(0)
    base = (part // P).to(tl.int64) * T
    begin = (part % P) * split
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    seen = tl.zeros((BC, BT), dtype=tl.int32)
    first = tl.full((BC, BT), T, dtype=tl.int32)
    for start in range(begin, tl.minimum(begin + split, T), BT):
        t = start + tl.arange(0, BT)
        cluster = load_cluster(assignment_ptr, mask_ptr, base + t, t < T, HAS_MASK)
        here = c[:, None] == cluster[None, :]
        seen += here.to(tl.int32)
        first = tl.minimum(first, tl.where(here, t[None, :], T))
    at = part.to(tl.int64) * C + c
    tl.store(count_ptr + at, tl.sum(seen, axis=1), mask=c < C)
    tl.store(first_ptr + at, tl.min(first, axis=1), mask=c < C)


@triton.jit
def _census_kernel(
    assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    _census(assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK, BT, BC)


@triton.jit
def _sum_tokens(
    x_ptr, assignment_ptr, mask_ptr, first_ptr, T, D, C, P, split, HAS_MASK: tl.constexpr,
    ANCHORED: tl.constexpr, CAREFUL: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    base = (part // P).to(tl.int64) * T
    begin = (part % P) * split
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    total = tl.zeros((BC, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + split, T), BT):
        t = start + tl.arange(0, BT)
        known = (t[:, None] < T) & (d[None, :] < D)
        at = tl.arange(0, BT)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + (base + start) * D + at, mask=known, other=0.0)
        cluster = load_cluster(assignment_ptr, mask_ptr, base + t, t < T, HAS_MASK)
        if ANCHORED:
            counted = (cluster >= 0) & (cluster < C)
            anchor = tl.load(first_ptr + part * C + cluster, mask=counted, other=0)
            known &= counted[:, None]
            x -= tl.load(x_ptr + (base + anchor)[:, None] * D + d[None, :], mask=known, other=0.0)
        if CAREFUL:
            x = tl.where(known & (tl.abs(x.to(tl.float32)) < POISON), x, 0.0)
        here = c[:, None] == cluster[None, :]
        if ANCHORED:
            total = dot_in_two(as_number(here, tl.bfloat16), x, total)
        else:
            total = dot(as_number(here, x.dtype), x, total)
    return total


@triton.jit
def _sums_kernel(
    x_ptr, assignment_ptr, mask_ptr, count_ptr, first_ptr, sums_ptr, T, D, C, P, split,
    HAS_MASK: tl.constexpr, ANCHORED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Pass 1. Floor: one read of x."""
    part = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    if tl.program_id(1) * BD >= D:
        _census(assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK, BT, BC)
    else:
        total = _sum_tokens(
            x_ptr, assignment_ptr, mask_ptr, first_ptr, T, D, C, P, split, HAS_MASK, ANCHORED,
            ANCHORED, BT, BD, BC,
        )  # fmt: skip
        if not ANCHORED:
            # A NaN or inf reached every cluster of its feature: again, leaving such tokens out.
            if tl.max(tl.where(tl.abs(total) < POISON, 0, 1)) > 0:
                total = _sum_tokens(
                    x_ptr, assignment_ptr, mask_ptr, first_ptr, T, D, C, P, split, HAS_MASK,
                    ANCHORED, True, BT, BD, BC,
                )  # fmt: skip
        at = (part.to(tl.int64) * C + c)[:, None] * D + d[None, :]
        tl.store(sums_ptr + at, total, mask=(c[:, None] < C) & (d[None, :] < D))


@triton.jit
def _means(
    x_ptr, count_ptr, first_ptr, sums_ptr, c, d, T, D, C, P, ANCHORED: tl.constexpr,
    BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Means of this program's clusters and features, over all splits of its set.

    float64, so that tokens that are all equal have exactly their own value for a mean.
    """
    set_of = tl.program_id(0) // P
    known = (c[:, None] < C) & (d[None, :] < D)
    total = tl.zeros((BC, BD), dtype=tl.float64)
    tokens = tl.zeros((BC,), dtype=tl.int32)
    for p in tl.range(0, P, loop_unroll_factor=4):  # 4 loads under way instead of one
        row = (set_of * P + p).to(tl.int64) * C + c
        count = tl.load(count_ptr + row, mask=c < C, other=0)
        part = tl.load(sums_ptr + row[:, None] * D + d[None, :], mask=known, other=0.0)
        total += part.to(tl.float64)
        if ANCHORED:
            first = set_of.to(tl.int64) * T + tl.load(first_ptr + row, mask=count > 0, other=0)
            at = first[:, None] * D + d[None, :]
            anchor = tl.load(x_ptr + at, mask=known & (count > 0)[:, None], other=0.0)
            total += anchor.to(tl.float64) * count[:, None].to(tl.float64)
        tokens += count
    share = 1.0 / tl.maximum(tokens, 1).to(tl.float64)
    return (total * share[:, None]).to(tl.float32)


@triton.jit
def _deviations_kernel(
    x_ptr, assignment_ptr, mask_ptr, count_ptr, first_ptr, sums_ptr, mean_ptr, spread_ptr, T, D, C,
    P, split, HAS_MASK: tl.constexpr, ANCHORED: tl.constexpr, MEASURE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pass 2. Floor: one read of x."""
    part = tl.program_id(0)
    base = (part // P).to(tl.int64) * T
    begin = (part % P) * split
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    from_c = tl.program_id(2) * BC
    c = from_c + tl.arange(0, BC)
    known_c = (c[:, None] < C) & (d[None, :] < D)
    mean = _means(x_ptr, count_ptr, first_ptr, sums_ptr, c, d, T, D, C, P, ANCHORED, BD, BC)
    if part % P == 0:
        at = ((part // P).to(tl.int64) * C + c)[:, None] * D + d[None, :]
        tl.store(mean_ptr + at, mean, mask=known_c)
    # The place of this program's result holds the means until then: tokens look theirs up there.
    slot_ptr = spread_ptr + part.to(tl.int64) * C * D
    tl.store(slot_ptr + c[:, None] * D + d[None, :], mean, mask=known_c)
    tl.debug_barrier()
    total = tl.zeros((BC, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + split, T), BT):
        t = start + tl.arange(0, BT)
        known = (t[:, None] < T) & (d[None, :] < D)
        at = tl.arange(0, BT)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + (base + start) * D + at, mask=known, other=0.0)
        cluster = load_cluster(assignment_ptr, mask_ptr, base + t, t < T, HAS_MASK)
        mine = (cluster >= from_c) & (cluster < tl.minimum(from_c + BC, C))
        own = slot_ptr + cluster[:, None] * D + d[None, :]
        away = x.to(tl.float32) - tl.load(own, mask=known & mine[:, None], other=0.0)
        member = as_number(c[:, None] == cluster[None, :], tl.bfloat16)
        if MEASURE == "sign":
            sign = (away > 0).to(tl.float32) - (away < 0).to(tl.float32)
            total = dot(member, sign.to(tl.bfloat16), total)
        else:
            term = tl.abs(away) if MEASURE == "mad" else away * away
            term = tl.where(term < POISON, term, POISON)
            total = dot_in_two(member, term, total)
    tl.debug_barrier()
    tl.store(slot_ptr + c[:, None] * D + d[None, :], total, mask=known_c)
