"""The gradient of a router's tokens and embeddings, from that of its affinities.

    d affinity    2 or 3 bf16 pieces, of affinity_gradient.py
    d x           (d affinity @ embedding) * scale of the token's cluster
    d embedding   d affinity^T @ (x * scale), in partial sums over splits of the tokens: no atomics
The scale is a constant here. Of sorted tokens a block has one, which multiplies its product instead
of every token. Floors: x's bytes written; x's bytes read.

T tokens, D features, E experts, C clusters, P splits, Z pieces.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import accurate_dot, pieces
from acmoe.ops.device.reduce_partials import totals
from acmoe.ops.route.triton.tokens import Tokens, load_limits, load_scale, load_scaled, load_tokens
from acmoe.ops.statistics.triton.dispersion import PROGRAMS, split_tokens


class Tile(NamedTuple):
    tokens: int
    features: int
    experts: int
    num_warps: int
    num_stages: int
    steps: int = 1  # blocks of features that a program does one after the other
    near: bool = False  # programs of the same tokens follow each other, else those of next tokens
    ahead: bool = False  # what is added is asked for a step before


def token_table(num_experts: int, dim: int, num_pieces: int, in_order: bool) -> Tile:
    """All experts in one step of the product: a program reads its tokens' gradients once.

    That serves 8 blocks of features (olmoe: 1 took 43 us more, H200); 3 of the 6 of a narrow model
    in float32, that there be programs enough. The gradients of sorted tokens come from all over
    memory, long ones with many experts: 135 us with 16 blocks, 158 with 8 (qwen30b). More experts,
    or 3 pieces of 128, do not fit the registers, and are read for every block.

    Wide rows in their own order are written whole by programs in a row: 98 -> 88 us at olmoe, 83
    with addends a step ahead (qwen30b 138 -> 118, fine 105 -> 91); sorted ones lose by both. A
    narrow row of 16-bit numbers is one program's, with addends ahead: the layer of switch takes 2
    us less, that of swin 4; sorted, 2 less at switch, but 3 more at swin.
    """
    experts = max(16, triton.next_power_of_2(num_experts))
    if experts > (128 if num_pieces == 2 else 64):
        return Tile(64, 64, 64, 4, 2, 1)
    narrow = dim < 1024
    if in_order and narrow and num_pieces == 3:
        return Tile(64, 64, experts, 4, 3, 3)
    if in_order:
        tokens, num_warps, stages = (128, 8, 2) if experts == 128 and not narrow else (64, 4, 3)
        return Tile(tokens, 64, experts, num_warps, stages, 8, True, True)
    if experts == 128:
        return Tile(64, 64, experts, 4, 2, 16)
    return Tile(64, 64, experts, 4, 3, 8, ahead=dim < 384 and num_pieces == 2)


def embedding_table(num_experts: int, dim: int, num_pieces: int) -> Tile:
    """4 warps up to 64 experts: 8 took 86 us for 50, and 217 for 146 with a scale (H200, olmoe).

    A sorted token is two loads in turn, of its place and of itself: of three stages one load of x
    is under way, of five two (switch: 15.3 -> 12.7 us). For more experts these fill the memory; a
    fourth fits beside two pieces (58 -> 53 us at olmoe, 105 -> 96 at qwen30b, plain). With few
    experts blocks of a wide model are wide: fewer read the gradients (mixtral 51 -> 35).
    """
    experts = min(128, max(16, triton.next_power_of_2(num_experts)))
    num_warps = 8 if experts == 128 else 4
    if dim < 1024:
        return Tile(64, 64, 16, 4, 5) if experts == 16 else Tile(64, 32, experts, num_warps, 3)
    if num_pieces == 3:
        return Tile(64, 64, experts, num_warps, 3)
    return Tile(64, 128 if experts == 16 else 64, experts, num_warps, 4)


def terms(dtype: torch.dtype) -> int:
    """Products per product: the gradient of a 16-bit token is rounded to far less than 3 leave."""
    return 6 if dtype == torch.float32 else 3


def token_gradient(
    tokens: Tokens, grad_ZTE: Tensor, embedding_ED: Tensor, other_TD: Tensor | None = None
) -> Tensor:
    """d x (T, D), in x's dtype; other_TD is what comes to x from elsewhere, to be added."""
    T, D = tokens.x.shape
    Z, _, E = grad_ZTE.shape
    tile = token_table(E, D, Z, not tokens.has_order)
    grad_TD = torch.empty_like(tokens.x)
    if T > 0:
        columns = triton.cdiv(D, tile.features * tile.steps)
        _token_kernel[(tokens.blocks(tile.tokens) * columns,)](
            *tokens.pointers, grad_ZTE, embedding_ED.contiguous(),
            grad_TD if other_TD is None else other_TD.contiguous(), grad_TD, T, D, E,
            tokens.scale.shape[0], HAS_OTHER=other_TD is not None, **tokens.flags,
            TERMS=terms(tokens.x.dtype), BT=tile.tokens, BD=tile.features, BE=tile.experts,
            ONCE=tile.experts >= E, STEPS=tile.steps, NEAR=tile.near, AHEAD=tile.ahead,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return grad_TD


def embedding_gradient(tokens: Tokens, end: Tensor | None, grad_ZTE: Tensor) -> Tensor:
    """d embedding (E, D), float32. end: (C + 1,) where the clusters of sorted tokens end."""
    T, D = tokens.x.shape
    Z, _, E = grad_ZTE.shape
    tile = embedding_table(E, D, Z)
    blocks = triton.cdiv(D, tile.features), triton.cdiv(E, tile.experts)
    # What arrives from all over memory, as sorted tokens do, is waited for, and so is any block of
    # a narrow model: twice the programs hide that (sorted tokens of olmoe 99 -> 68 us).
    programs = 2 * PROGRAMS if D < 1024 or end is not None else PROGRAMS
    P, split = split_tokens(T, blocks[0] * blocks[1], tile.tokens, programs, most=64)
    partial_PED = grad_ZTE.new_empty(P, E, D, dtype=torch.float32)
    _embedding_kernel[(P, *blocks)](
        *tokens.pointers, tokens.place if end is None else end, grad_ZTE, partial_PED, T, D, E,
        tokens.scale.shape[0], split,
        **tokens.flags, TERMS=terms(tokens.x.dtype), BT=tile.tokens, BD=tile.features,
        BE=tile.experts, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return totals(partial_PED.view(1, P, E * D))[0].view(E, D)


@triton.jit
def _load_pieces(grad_ptr, known, T, E, TERMS: tl.constexpr):
    size = (tl.full((), 0, dtype=tl.int64) + T) * E
    high = tl.load(grad_ptr, mask=known, other=0.0)
    middle = tl.load(grad_ptr + size, mask=known, other=0.0)
    low = high
    if TERMS == 6:
        low = tl.load(grad_ptr + 2 * size, mask=known, other=0.0)
    return high, middle, low


@triton.jit
def _rows_of(grad_ptr, t, row, E, SORTED: tl.constexpr, BT: tl.constexpr):
    """(BT,) where these tokens' gradients begin: from int64 `row` on, or each at its own place."""
    if SORTED:
        rows = grad_ptr + t.to(tl.int64) * E
    else:
        rows = grad_ptr + row * E + tl.arange(0, BT) * E
    return rows


@triton.jit
def _token_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, place_ptr, grad_ptr, embedding_ptr, other_ptr,
    out_ptr, T, D, E, C, HAS_OTHER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr,
    SORTED: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, ONCE: tl.constexpr,
    STEPS: tl.constexpr, NEAR: tl.constexpr, AHEAD: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(D, STEPS * BD)
    if NEAR:
        start, first = tl.program_id(0) // columns * BT, tl.program_id(0) % columns * STEPS * BD
    else:
        blocks = tl.num_programs(0) // columns
        start, first = tl.program_id(0) % blocks * BT, tl.program_id(0) // blocks * STEPS * BD
    t, exists, kept, cluster = load_tokens(
        cluster_ptr, mask_ptr, place_ptr, load_limits(cluster_ptr, C, BC), start, T, C, HAS_SCALE,
        HAS_MASK, SORTED, BT, BC,
    )  # fmt: skip
    if SORTED:
        if tl.max(t) < 0:
            return
    row = start.to(tl.int64)
    row_ptr = _rows_of(grad_ptr, t, row, E, SORTED, BT)
    at = tl.arange(0, BT)[:, None] * D
    if SORTED:
        at = t.to(tl.int64)[:, None] * D
    else:
        out_ptr += row * D
        other_ptr += row * D
    e = tl.arange(0, BE)
    grad = _load_pieces(
        row_ptr[:, None] + e[None, :], kept[:, None] & (e[None, :] < E), T, E, TERMS
    )  # fmt: skip
    last = tl.minimum(first + STEPS * BD, D)
    ahead = exists
    if HAS_OTHER and AHEAD:
        d = first + tl.arange(0, BD)
        known = exists[:, None] & (d[None, :] < last)
        ahead = tl.load(other_ptr + at + d[None, :], mask=known, other=0.0)
    for begin in range(first, last, BD):
        d = begin + tl.arange(0, BD)
        known = exists[:, None] & (d[None, :] < D)
        other = ahead
        if HAS_OTHER:
            if AHEAD:
                following = exists[:, None] & (d[None, :] + BD < last)
                ahead = tl.load(other_ptr + at + d[None, :] + BD, mask=following, other=0.0)
            else:  # before the product, and needed after it
                other = tl.load(other_ptr + at + d[None, :], mask=known, other=0.0)
        total = _spread(embedding_ptr, grad, e, d, D, E, TERMS)
        if not ONCE:
            for more in range(BE, E, BE):
                part = _load_pieces(
                    row_ptr[:, None] + more + e[None, :],
                    kept[:, None] & (more + e[None, :] < E), T, E, TERMS,
                )  # fmt: skip
                total += _spread(embedding_ptr, part, more + e, d, D, E, TERMS)
        if SORTED:
            total *= load_scale(scale_ptr, cluster, d, D)[None, :]
        elif HAS_SCALE:
            scaled = (kept & (cluster >= 0))[:, None] & (d[None, :] < D)
            total *= tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=scaled, other=1.0)
        if HAS_OTHER:
            total += other.to(tl.float32)
        tl.store(out_ptr + at + d[None, :], total.to(out_ptr.dtype.element_ty), mask=known)


@triton.jit
def _spread(embedding_ptr, grad, e, d, D, E, TERMS: tl.constexpr):
    """Gradients of the affinities of experts e, times their embeddings at features d."""
    WHOLE: tl.constexpr = embedding_ptr.dtype.element_ty == tl.bfloat16  # not cut into pieces
    known = (e[:, None] < E) & (d[None, :] < D)
    weight = tl.load(embedding_ptr + e[:, None] * D + d[None, :], mask=known, other=0.0)
    high, middle, low = pieces(weight.to(tl.float32), WHOLE)
    return accurate_dot(grad[0], grad[1], grad[2], high, middle, low, False, WHOLE, TERMS)


@triton.jit
def _embedding_kernel(
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, place_ptr, end_ptr, grad_ptr, out_ptr, T, D, E, C,
    split, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr, SORTED: tl.constexpr,
    PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    size, count = split, T
    if SORTED:  # only the device knows how many places are taken
        count = tl.load(end_ptr + C)
        size = tl.cdiv(tl.cdiv(count, BT), tl.num_programs(0)) * BT
    begin = tl.program_id(0) * size
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    limit = load_limits(cluster_ptr, C, BC)
    total = tl.zeros((BE, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + size, count), BT):
        row = tl.full((), 0, dtype=tl.int64) + start
        t, _, kept, cluster = load_tokens(
            cluster_ptr, mask_ptr, place_ptr, limit, start, T, C, HAS_SCALE, HAS_MASK, SORTED, BT,
            BC,
        )  # fmt: skip
        if SORTED and BC > 0:
            scale = load_scale(scale_ptr, cluster, d, D)
        x = load_scaled(x_ptr, scale_ptr, cluster, t, row, kept, d, D, HAS_SCALE, SORTED, BT)
        high, middle, low = pieces(x, PLAIN_BF16)
        row_ptr = _rows_of(grad_ptr, t, row, E, SORTED, BT)
        known = kept[None, :] & (e[:, None] < E)
        grad_high, grad_middle, grad_low = _load_pieces(
            row_ptr[None, :] + e[:, None], known, T, E, TERMS
        )
        product = accurate_dot(
            grad_high, grad_middle, grad_low, high, middle, low, False, PLAIN_BF16, TERMS
        )  # fmt: skip
        if SORTED:
            if BC == 0:
                scale = load_scale(scale_ptr, cluster, d, D)
            product *= scale[None, :]
        total += product
    at = (tl.program_id(0).to(tl.int64) * E + e)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, total, mask=(e[:, None] < E) & (d[None, :] < D))
