"""Two-pass sums per cluster over unsorted tokens: the Triton form of ops/statistics/reference.py.

    pass 1   sum of x (C, D) and token count (C,)     reads x once: B T D itemsize bytes
    pass 2   sum of |x - mean| or (x - mean)^2 (C, D)  reads x once more

The sum over each cluster's tokens is a GEMM with a one-hot matrix on tensor cores, in float32: no
sort, no atomics, the same bits in every run, and no slowdown where one cluster holds all tokens.
Each program owns (a split of the tokens) x (a block of features) x (a block of clusters) and
writes one partial sum. The (P, C, D) float32 partials are small beside x; scale.py reduces them.

Precision. A 16-bit token enters pass 1 as it is: while the values of a feature share one binade
and a split has at most 2^16 tokens (bf16; 2^13 in fp16) every sum is exact, so a large common
offset costs nothing. A float32 token is taken relative to the first token of its cluster in the
split (its anchor), as in the reference. float32 operands are bf16x2 splits: a relative error of
2^-18 per term, of random sign.

B sets of T tokens, D features, C clusters, P splits of each set.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import dot, dot_bf16x2, mask_to_dtype
from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

# Two programs on each of an H200's 132 multiprocessors. It is a constant, not read from the device:
# the number of splits decides the order of additions, and the GPU should not change a result.
PROGRAMS = 264
MAX_SPLITS = 32  # each program of pass 2 first adds up at most this many partial sums
# Replaces a term that is not finite: within bf16's range, and far above any dispersion. Unlike NaN
# it stays in its own cluster when multiplied by the zeros of the one-hot matrix.
POISON = tl.constexpr(3.38e38)


class Tile(NamedTuple):
    """Tile sizes of both passes, and the warps and pipeline stages of each."""

    tokens: int
    features: int
    clusters: int
    warps: tuple[int, int]
    stages: tuple[int, int]


def launch_table(num_clusters: int, dim: int) -> Tile:
    """Return the tile sizes. Models with few features get narrow blocks, and so more programs.

    Pass 2 holds a term, a mean and a pointer for each element of its tile: with 4 warps and 200
    registers per thread a multiprocessor runs 8 warps, with 8 warps and 128 registers it runs 16.
    """
    clusters = max(16, min(128, next_power_of_2(num_clusters)))
    features = 64 if dim >= 1024 else 32
    min_warps = 8 if clusters == 128 else 4
    return Tile(
        64, features, clusters, warps=(min_warps, 8 if features == 64 else min_warps), stages=(3, 3)
    )


def split_tokens(
    num_tokens: int,
    programs_per_split: int,
    block: int,
    programs: int = PROGRAMS,
    most: int = MAX_SPLITS,
) -> tuple[int, int]:
    """Return the number of token splits, and the tokens per split: a multiple of the block."""
    target = max(programs // programs_per_split, cdiv(num_tokens, 4096))
    splits = max(1, min(target, most, cdiv(num_tokens, block)))
    size = cdiv(cdiv(max(num_tokens, 1), splits), block) * block
    return max(1, cdiv(num_tokens, size)), size


class Partials(NamedTuple):
    """Outputs of the two passes."""

    spread: Tensor  # (B, P, C, D) float32 sums of |x - mean|, (x - mean)^2 or signs
    count: Tensor  # (B, P, C) int32 tokens
    mean: Tensor  # (B, C, D) float32 mean of each cluster


def partial_sums(
    x_BTD: Tensor, assignment_BT: Tensor, mask_BT: Tensor | None, num_clusters: int, measure: str
) -> Partials:
    """Run both passes. measure: mad, square, or sign (of x - mean, for the gradient of mad)."""
    B, T, D = x_BTD.shape
    tile = launch_table(num_clusters, D)
    blocks = cdiv(D, tile.features), cdiv(num_clusters, tile.clusters)
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
    sizes = num_clusters, P, split
    block = {"HAS_MASK": mask_BT is not None, "BT": tile.tokens, "BC": tile.clusters}
    first, second = (
        {"num_warps": warps, "num_stages": stages}
        for warps, stages in zip(tile.warps, tile.stages, strict=True)
    )
    if anchored:
        launch(_count_kernel, (B * P, 1, blocks[1]), *tokens, T, *sizes, **block, **first)
    block |= {"BD": tile.features, "ANCHORED": anchored}
    # Without anchors pass 1 does not need the counts: one more feature block computes them.
    grid = (B * P, blocks[0] + (0 if anchored else 1), blocks[1])
    launch(_sums_kernel, grid, x_BTD, *tokens, sums_BPCD, T, D, *sizes, **block, **first)
    launch(
        _deviations_kernel, (B * P, *blocks), x_BTD, *tokens, sums_BPCD, mean_BCD, spread_BPCD, T,
        D, *sizes, MEASURE=measure, **block, **second,
    )  # fmt: skip
    return Partials(spread_BPCD, count_BPC, mean_BCD)


@triton.jit
def load_cluster(assignment_ptr, mask_ptr, row, inside, HAS_MASK: tl.constexpr):
    """Load the cluster of the tokens in `row`; -1 for masked ones."""
    cluster = tl.load(assignment_ptr + row, mask=inside, other=-1)
    if HAS_MASK:
        cluster = tl.where(tl.load(mask_ptr + row, mask=inside, other=0) != 0, cluster, -1)
    return cluster.to(tl.int32)


@triton.jit
def _count_tokens(
    assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store each cluster's token count in this split, and the index of its first token."""
    part = tl.program_id(0)
    base = (part // P).to(tl.int64) * T
    begin = (part % P) * split
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    count = tl.zeros((BC, BT), dtype=tl.int32)
    first = tl.full((BC, BT), T, dtype=tl.int32)
    for start in range(begin, tl.minimum(begin + split, T), BT):
        t = start + tl.arange(0, BT)
        cluster = load_cluster(assignment_ptr, mask_ptr, base + t, t < T, HAS_MASK)
        member = c[:, None] == cluster[None, :]
        count += member.to(tl.int32)
        first = tl.minimum(first, tl.where(member, t[None, :], T))
    offs = part.to(tl.int64) * C + c
    tl.store(count_ptr + offs, tl.sum(count, axis=1), mask=c < C)
    tl.store(first_ptr + offs, tl.min(first, axis=1), mask=c < C)


@triton.jit
def _count_kernel(
    assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Count before pass 1, which needs each cluster's first token as the anchor."""
    _count_tokens(assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK, BT, BC)


@triton.jit
def _sum_tokens(
    x_ptr, assignment_ptr, mask_ptr, first_ptr, T, D, C, P, split, HAS_MASK: tl.constexpr,
    ANCHORED: tl.constexpr, SKIP_NON_FINITE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Return this program's (BC, BD) sum of x per cluster.

    SKIP_NON_FINITE: replace NaN and inf by 0, so that they do not reach other clusters as 0 * NaN.
    """
    part = tl.program_id(0)
    base = (part // P).to(tl.int64) * T
    begin = (part % P) * split
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    acc = tl.zeros((BC, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + split, T), BT):
        t = start + tl.arange(0, BT)
        valid = (t[:, None] < T) & (d[None, :] < D)
        offs = tl.arange(0, BT)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + (base + start) * D + offs, mask=valid, other=0.0)
        cluster = load_cluster(assignment_ptr, mask_ptr, base + t, t < T, HAS_MASK)
        if ANCHORED:
            counted = (cluster >= 0) & (cluster < C)
            anchor = tl.load(first_ptr + part * C + cluster, mask=counted, other=0)
            valid &= counted[:, None]
            x -= tl.load(x_ptr + (base + anchor)[:, None] * D + d[None, :], mask=valid, other=0.0)
        if SKIP_NON_FINITE:
            x = tl.where(valid & (tl.abs(x.to(tl.float32)) < POISON), x, 0.0)
        member = c[:, None] == cluster[None, :]
        if ANCHORED:
            acc = dot_bf16x2(mask_to_dtype(member, tl.bfloat16), x, acc)
        else:
            acc = dot(mask_to_dtype(member, x.dtype), x, acc)
    return acc


@triton.jit
def _sums_kernel(
    x_ptr, assignment_ptr, mask_ptr, count_ptr, first_ptr, sums_ptr, T, D, C, P, split,
    HAS_MASK: tl.constexpr, ANCHORED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Pass 1. Memory traffic: one read of x."""
    part = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    if tl.program_id(1) * BD >= D:
        _count_tokens(
            assignment_ptr, mask_ptr, count_ptr, first_ptr, T, C, P, split, HAS_MASK, BT, BC
        )
    else:
        acc = _sum_tokens(
            x_ptr, assignment_ptr, mask_ptr, first_ptr, T, D, C, P, split, HAS_MASK, ANCHORED,
            ANCHORED, BT, BD, BC,
        )  # fmt: skip
        if not ANCHORED:
            # A NaN or inf reached every cluster of its feature: sum again without such values.
            if tl.max(tl.where(tl.abs(acc) < POISON, 0, 1)) > 0:
                acc = _sum_tokens(
                    x_ptr, assignment_ptr, mask_ptr, first_ptr, T, D, C, P, split, HAS_MASK,
                    ANCHORED, True, BT, BD, BC,
                )  # fmt: skip
        offs = (part.to(tl.int64) * C + c)[:, None] * D + d[None, :]
        tl.store(sums_ptr + offs, acc, mask=(c[:, None] < C) & (d[None, :] < D))


@triton.jit
def _means(
    x_ptr, count_ptr, first_ptr, sums_ptr, c, d, T, D, C, P, ANCHORED: tl.constexpr,
    BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return the means of this program's clusters and features, over all splits of its set.

    Sums are float64, so that the mean of equal tokens is exactly their value.
    """
    set_of = tl.program_id(0) // P
    valid = (c[:, None] < C) & (d[None, :] < D)
    acc = tl.zeros((BC, BD), dtype=tl.float64)
    tokens = tl.zeros((BC,), dtype=tl.int32)
    for p in tl.range(0, P, loop_unroll_factor=4):  # 4 loads in flight instead of one
        row = (set_of * P + p).to(tl.int64) * C + c
        count = tl.load(count_ptr + row, mask=c < C, other=0)
        part = tl.load(sums_ptr + row[:, None] * D + d[None, :], mask=valid, other=0.0)
        acc += part.to(tl.float64)
        if ANCHORED:
            first = set_of.to(tl.int64) * T + tl.load(first_ptr + row, mask=count > 0, other=0)
            offs = first[:, None] * D + d[None, :]
            anchor = tl.load(x_ptr + offs, mask=valid & (count > 0)[:, None], other=0.0)
            acc += anchor.to(tl.float64) * count[:, None].to(tl.float64)
        tokens += count
    inverse_count = 1.0 / tl.maximum(tokens, 1).to(tl.float64)
    return (acc * inverse_count[:, None]).to(tl.float32)


@triton.jit
def _deviations_kernel(
    x_ptr, assignment_ptr, mask_ptr, count_ptr, first_ptr, sums_ptr, mean_ptr, spread_ptr, T, D, C,
    P, split, HAS_MASK: tl.constexpr, ANCHORED: tl.constexpr, MEASURE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pass 2. Memory traffic: one read of x."""
    part = tl.program_id(0)
    base = (part // P).to(tl.int64) * T
    begin = (part % P) * split
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    from_c = tl.program_id(2) * BC
    c = from_c + tl.arange(0, BC)
    valid_c = (c[:, None] < C) & (d[None, :] < D)
    mean = _means(x_ptr, count_ptr, first_ptr, sums_ptr, c, d, T, D, C, P, ANCHORED, BD, BC)
    if part % P == 0:
        offs = ((part // P).to(tl.int64) * C + c)[:, None] * D + d[None, :]
        tl.store(mean_ptr + offs, mean, mask=valid_c)
    # The memory of this program's result first holds the means, which tokens gather by cluster.
    part_ptr = spread_ptr + part.to(tl.int64) * C * D
    tl.store(part_ptr + c[:, None] * D + d[None, :], mean, mask=valid_c)
    tl.debug_barrier()
    acc = tl.zeros((BC, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + split, T), BT):
        t = start + tl.arange(0, BT)
        valid = (t[:, None] < T) & (d[None, :] < D)
        offs = tl.arange(0, BT)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + (base + start) * D + offs, mask=valid, other=0.0)
        cluster = load_cluster(assignment_ptr, mask_ptr, base + t, t < T, HAS_MASK)
        in_block = (cluster >= from_c) & (cluster < tl.minimum(from_c + BC, C))
        mean_ptrs = part_ptr + cluster[:, None] * D + d[None, :]
        deviation = x.to(tl.float32) - tl.load(mean_ptrs, mask=valid & in_block[:, None], other=0.0)
        member = mask_to_dtype(c[:, None] == cluster[None, :], tl.bfloat16)
        if MEASURE == "sign":
            sign = (deviation > 0).to(tl.float32) - (deviation < 0).to(tl.float32)
            acc = dot(member, sign.to(tl.bfloat16), acc)
        else:
            term = tl.abs(deviation) if MEASURE == "mad" else deviation * deviation
            term = tl.where(term < POISON, term, POISON)
            acc = dot_bf16x2(member, term, acc)
    tl.debug_barrier()
    tl.store(part_ptr + c[:, None] * D + d[None, :], acc, mask=valid_c)
