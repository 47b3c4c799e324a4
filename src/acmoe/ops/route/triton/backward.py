"""Gradients of the router's tokens and embeddings, from the gradient of its affinities.

    d affinity (T, E)    as 2 or 3 bf16 parts (affinity_gradient.py)
    d x (T, D)           (d affinity @ embedding) * scale of the token's cluster
    d embedding (E, D)   d affinity^T @ (x * scale)

The scale is a constant here. A block of sorted tokens has one scale, which multiplies the GEMM's
result instead of every token. For d x a program owns a block of tokens and `steps` blocks of
features. For d embedding the GEMM is split-K over tokens: each program writes one partial sum, and
`reduce_partials` reduces them in a fixed order, without atomics. Memory traffic: d x writes as many
bytes as x has, d embedding reads x once.

T tokens, D features, E experts, C clusters, P token splits, Z bf16 parts. Names such as olmoe are
benchmark shapes (lab/bench/shapes.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import accurate_dot, split_bf16
from acmoe.ops.device.reduce_partials import reduce_partials
from acmoe.ops.route.triton.tokens import (
    Tokens,
    load_cluster_ends,
    load_scale,
    load_scaled,
    load_tokens,
)
from acmoe.ops.statistics.triton.dispersion import PROGRAMS, split_tokens


class Tile(NamedTuple):
    """Tile sizes (BT tokens, BD features, BE experts) and launch options of a kernel."""

    tokens: int
    features: int
    experts: int
    num_warps: int
    num_stages: int
    steps: int = 1  # blocks of features that one program computes in sequence
    token_major: bool = False  # consecutive programs share a token block, not a feature block
    prefetch_addend: bool = False  # load the addend of a feature block one step early


def token_launch_table(num_experts: int, dim: int, num_parts: int, unsorted: bool) -> Tile:
    """Choose the tile of `_token_kernel`.

    Where registers allow, BE covers all experts, and a program loads d affinity of its tokens once
    for `steps` blocks of features. 8 blocks are usual: 1 took 43 us more (olmoe, H200). A narrow
    float32 model has 6 and takes 3 at a time, so that there are enough programs. For sorted tokens
    the rows of
    d affinity are scattered in memory, and long ones with many experts: 135 us with 16 blocks, 158
    with 8 (qwen30b). More than 128 experts, or 128 with a bf16x3 split, do not fit the registers;
    their d affinity is loaded again for every block of features, by whole rows if unsorted: 207 us
    with 3 stages against 287 with 2 and by columns, with a scale 234 against 327 (qwen3next).

    For unsorted tokens of a wide model `token_major` lets consecutive programs write whole rows: 98
    -> 88 us at olmoe, and 83 with `prefetch_addend` (qwen30b 138 -> 118, fine 105 -> 91). Sorted
    tokens get slower by both. A narrow row of 16-bit numbers belongs to one program, with
    prefetched addends: the layer of switch takes 2 us less, that of swin 4 us less; for sorted
    tokens 2 us less at switch, but 3 us more at swin.
    """
    experts = max(16, triton.next_power_of_2(num_experts))
    if experts > (128 if num_parts == 2 else 64):
        return Tile(64, 64, 64, 4, 3 if num_parts == 2 else 2, 1, unsorted)
    narrow = dim < 1024
    if unsorted and narrow and num_parts == 3:
        return Tile(64, 64, experts, 4, 3, 3)
    if unsorted:
        tokens, num_warps, stages = (128, 8, 2) if experts == 128 and not narrow else (64, 4, 3)
        return Tile(tokens, 64, experts, num_warps, stages, 8, True, True)
    if experts == 128:
        return Tile(64, 64, experts, 4, 2, 16)
    return Tile(64, 64, experts, 4, 3, 8, prefetch_addend=dim < 384 and num_parts == 2)


def embedding_launch_table(
    num_experts: int, dim: int, num_parts: int, rescaled: bool = False
) -> Tile:
    """Choose the tile of `_embedding_kernel`.

    Up to 64 experts use 4 warps: 8 warps took 86 us instead of 50, and 217 instead of 146 with a
    scale (olmoe, H200). A sorted token takes two dependent loads, first its index and then its row:
    with 3 stages one load of x is in flight, with 5 stages two (switch: 15.3 -> 12.7 us). With more
    experts 5 stages would exceed the shared memory; a fourth one fits with a bf16x2 split (58 -> 53
    us at olmoe, 105 -> 96 at qwen30b, without a scale). With few experts a wide model gets wide
    blocks of features, so that fewer programs read d affinity (mixtral 51 -> 35 us). So do many
    experts (qwen3next 194 -> 150 us), unless each token is rescaled (323 -> 467).
    """
    experts = min(128, max(16, triton.next_power_of_2(num_experts)))
    num_warps = 8 if experts == 128 else 4
    if dim < 1024:
        return Tile(64, 64, 16, 4, 5) if experts == 16 else Tile(64, 32, experts, num_warps, 3)
    if num_parts == 3:
        return Tile(64, 64, experts, num_warps, 3)
    if num_experts > 256 and not rescaled:
        return Tile(64, 128, 64, 4, 3)
    return Tile(64, 128 if experts == 16 else 64, experts, num_warps, 4)


def terms(dtype: torch.dtype) -> int:
    """Return TERMS of `accurate_dot`: the bf16 GEMMs that one float32 GEMM is computed by.

    3 suffice for 16-bit tokens: their gradient is rounded to 16 bits, which loses far more.
    """
    return 6 if dtype == torch.float32 else 3


def token_gradient(
    tokens: Tokens, grad_ZTE: Tensor, embedding_ED: Tensor, addend_TD: Tensor | None = None
) -> Tensor:
    """Return d x (T, D) in x's dtype, plus addend_TD: the gradient of x from other consumers."""
    T, D = tokens.x.shape
    Z, _, E = grad_ZTE.shape
    tile = token_launch_table(E, D, Z, not tokens.is_sorted)
    grad_TD = torch.empty_like(tokens.x)
    if T > 0:
        columns = triton.cdiv(D, tile.features * tile.steps)
        _token_kernel[(tokens.blocks(tile.tokens) * columns,)](
            *tokens.pointers, grad_ZTE, embedding_ED.contiguous(),
            grad_TD if addend_TD is None else addend_TD.contiguous(), grad_TD, T, D, E,
            tokens.scale.shape[0], HAS_ADDEND=addend_TD is not None, **tokens.flags,
            TERMS=terms(tokens.x.dtype), BT=tile.tokens, BD=tile.features, BE=tile.experts,
            ALL_EXPERTS=tile.experts >= E, STEPS=tile.steps, TOKEN_MAJOR=tile.token_major,
            PREFETCH=tile.prefetch_addend,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return grad_TD


def embedding_gradient(tokens: Tokens, end: Tensor | None, grad_ZTE: Tensor) -> Tensor:
    """Return d embedding (E, D), float32.

    end: (C + 1,) slot after the last token of each cluster, if tokens are sorted.
    """
    T, D = tokens.x.shape
    Z, _, E = grad_ZTE.shape
    tile = embedding_launch_table(E, D, Z, tokens.has_scale and not tokens.is_sorted)
    blocks = triton.cdiv(D, tile.features), triton.cdiv(E, tile.experts)
    # Sorted tokens are gathered from scattered rows, and narrow models have short rows: both are
    # bound by latency, which twice the programs hide (sorted tokens of olmoe 99 -> 68 us).
    programs = 2 * PROGRAMS if D < 1024 or end is not None else PROGRAMS
    P, split = split_tokens(T, blocks[0] * blocks[1], tile.tokens, programs, most=64)
    partial_PED = grad_ZTE.new_empty(P, E, D, dtype=torch.float32)
    _embedding_kernel[(P, *blocks)](
        *tokens.pointers, tokens.permutation if end is None else end, grad_ZTE, partial_PED, T, D,
        E, tokens.scale.shape[0], split,
        **tokens.flags, TERMS=terms(tokens.x.dtype), BT=tile.tokens, BD=tile.features,
        BE=tile.experts, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return reduce_partials(partial_PED.view(1, P, E * D))[0].view(E, D)


@triton.jit
def _load_bf16_split(grad_ptr, valid, T, E, TERMS: tl.constexpr):
    """Load the two (TERMS = 3) or three (TERMS = 6) bf16 parts of d affinity."""
    size = (tl.full((), 0, dtype=tl.int64) + T) * E
    high = tl.load(grad_ptr, mask=valid, other=0.0)
    middle = tl.load(grad_ptr + size, mask=valid, other=0.0)
    low = high
    if TERMS == 6:
        low = tl.load(grad_ptr + 2 * size, mask=valid, other=0.0)
    return high, middle, low


@triton.jit
def _row_pointers(grad_ptr, t, row, E, SORTED: tl.constexpr, BT: tl.constexpr):
    """Return (BT,) pointers to rows of d affinity: those from int64 `row` on; if sorted, rows t."""
    if SORTED:
        rows = grad_ptr + t.to(tl.int64) * E
    else:
        rows = grad_ptr + row * E + tl.arange(0, BT) * E
    return rows


@triton.jit
def _token_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, perm_ptr, grad_ptr, embedding_ptr, addend_ptr,
    out_ptr, T, D, E, C, HAS_ADDEND: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr,
    SORTED: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, ALL_EXPERTS: tl.constexpr,
    STEPS: tl.constexpr, TOKEN_MAJOR: tl.constexpr, PREFETCH: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(D, STEPS * BD)
    if TOKEN_MAJOR:
        start, first = tl.program_id(0) // columns * BT, tl.program_id(0) % columns * STEPS * BD
    else:
        blocks = tl.num_programs(0) // columns
        start, first = tl.program_id(0) % blocks * BT, tl.program_id(0) // blocks * STEPS * BD
    t, in_bounds, unmasked, cluster = load_tokens(
        cluster_ptr, mask_ptr, perm_ptr, load_cluster_ends(cluster_ptr, C, BC), start, T, C,
        HAS_SCALE, HAS_MASK, SORTED, BT, BC,
    )  # fmt: skip
    if SORTED:
        if tl.max(t) < 0:
            return
    row = start.to(tl.int64)
    row_ptr = _row_pointers(grad_ptr, t, row, E, SORTED, BT)
    offs = tl.arange(0, BT)[:, None] * D
    if SORTED:
        offs = t.to(tl.int64)[:, None] * D
    else:
        out_ptr += row * D
        addend_ptr += row * D
    e = tl.arange(0, BE)
    if ALL_EXPERTS:
        grad = _load_bf16_split(
            row_ptr[:, None] + e[None, :], unmasked[:, None] & (e[None, :] < E), T, E, TERMS
        )
    last = tl.minimum(first + STEPS * BD, D)
    next_addend = in_bounds
    if HAS_ADDEND and PREFETCH:
        d = first + tl.arange(0, BD)
        valid = in_bounds[:, None] & (d[None, :] < last)
        next_addend = tl.load(addend_ptr + offs + d[None, :], mask=valid, other=0.0)
    for start_d in range(first, last, BD):
        d = start_d + tl.arange(0, BD)
        valid = in_bounds[:, None] & (d[None, :] < D)
        addend = next_addend
        if HAS_ADDEND:
            if PREFETCH:
                next_valid = in_bounds[:, None] & (d[None, :] + BD < last)
                next_addend = tl.load(
                    addend_ptr + offs + d[None, :] + BD, mask=next_valid, other=0.0
                )
            else:  # load before the GEMM, used after it
                addend = tl.load(addend_ptr + offs + d[None, :], mask=valid, other=0.0)
        if ALL_EXPERTS:
            acc = _grad_times_embedding(embedding_ptr, grad, e, d, D, E, TERMS)
        else:
            acc = tl.zeros((BT, BD), dtype=tl.float32)
            for start_e in range(0, E, BE):
                part = _load_bf16_split(
                    row_ptr[:, None] + start_e + e[None, :],
                    unmasked[:, None] & (start_e + e[None, :] < E), T, E, TERMS,
                )  # fmt: skip
                acc += _grad_times_embedding(embedding_ptr, part, start_e + e, d, D, E, TERMS)
        if SORTED:
            acc *= load_scale(scale_ptr, cluster, d, D)[None, :]
        elif HAS_SCALE:
            scaled = (unmasked & (cluster >= 0))[:, None] & (d[None, :] < D)
            acc *= tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=scaled, other=1.0)
        if HAS_ADDEND:
            acc += addend.to(tl.float32)
        tl.store(out_ptr + offs + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _grad_times_embedding(embedding_ptr, grad, e, d, D, E, TERMS: tl.constexpr):
    """Return d affinity of experts e times their embeddings at features d: (BT, BD)."""
    IS_BF16: tl.constexpr = embedding_ptr.dtype.element_ty == tl.bfloat16  # needs no split
    valid = (e[:, None] < E) & (d[None, :] < D)
    weight = tl.load(embedding_ptr + e[:, None] * D + d[None, :], mask=valid, other=0.0)
    high, middle, low = split_bf16(weight.to(tl.float32), IS_BF16)
    return accurate_dot(grad[0], grad[1], grad[2], high, middle, low, False, IS_BF16, TERMS)


@triton.jit
def _embedding_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, perm_ptr, end_ptr, grad_ptr, out_ptr, T, D, E, C,
    split, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr, SORTED: tl.constexpr,
    PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    size, count = split, T
    if SORTED:  # only the device knows how many slots are in use
        count = tl.load(end_ptr + C)
        size = tl.cdiv(tl.cdiv(count, BT), tl.num_programs(0)) * BT
    begin = tl.program_id(0) * size
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    ends = load_cluster_ends(cluster_ptr, C, BC)
    acc = tl.zeros((BE, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + size, count), BT):
        row = tl.full((), 0, dtype=tl.int64) + start
        t, _, unmasked, cluster = load_tokens(
            cluster_ptr, mask_ptr, perm_ptr, ends, start, T, C, HAS_SCALE, HAS_MASK, SORTED, BT,
            BC,
        )  # fmt: skip
        if SORTED and BC > 0:
            scale = load_scale(scale_ptr, cluster, d, D)
        x = load_scaled(x_ptr, scale_ptr, cluster, t, row, unmasked, d, D, HAS_SCALE, SORTED, BT)
        high, middle, low = split_bf16(x, PLAIN_BF16)
        row_ptr = _row_pointers(grad_ptr, t, row, E, SORTED, BT)
        valid = unmasked[None, :] & (e[:, None] < E)
        grad_high, grad_middle, grad_low = _load_bf16_split(
            row_ptr[None, :] + e[:, None], valid, T, E, TERMS
        )
        product = accurate_dot(
            grad_high, grad_middle, grad_low, high, middle, low, False, PLAIN_BF16, TERMS
        )  # fmt: skip
        if SORTED:
            if BC == 0:
                scale = load_scale(scale_ptr, cluster, d, D)
            product *= scale[None, :]
        acc += product
    offs = (tl.program_id(0).to(tl.int64) * E + e)[:, None] * D + d[None, :]
    tl.store(out_ptr + offs, acc, mask=(e[:, None] < E) & (d[None, :] < D))
