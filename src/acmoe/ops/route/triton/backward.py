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

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import accurate_dot, split_bf16
from acmoe.ops.device.launcher import cdiv, launch
from acmoe.ops.device.reduce_partials import reduce_partials
from acmoe.ops.route.hopper.choice import hopper_unsupported
from acmoe.ops.route.triton.backward_tiles import embedding_launch_table, token_launch_table
from acmoe.ops.route.triton.rescale import MANY_EXPERTS, rescaled, worth_rescaling
from acmoe.ops.route.triton.tokens import (
    Tokens,
    load_cluster_ends,
    load_own_scale,
    load_scale,
    load_scaled,
    load_split,
    load_tokens,
)
from acmoe.ops.statistics.triton.dispersion import PROGRAMS, split_tokens


def gradient_terms(dtype: torch.dtype) -> int:
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
    if E > MANY_EXPERTS and Z == 2 and hopper_unsupported(tokens, embedding_ED) is None:
        from acmoe.ops.route.hopper.launch import launch_token_gradient

        return launch_token_gradient(tokens, grad_ZTE, embedding_ED, addend_TD)
    unsorted, has_addend = not tokens.is_sorted, addend_TD is not None
    tile = token_launch_table(E, D, Z, unsorted, tokens.has_scale, has_addend)
    grad_TD = torch.empty_like(tokens.x)
    if T > 0:
        columns = cdiv(D, tile.features * tile.steps)
        launch(
            _token_kernel, (tokens.blocks(tile.tokens) * columns,), *tokens.pointers, grad_ZTE,
            embedding_ED.contiguous(),
            grad_TD if addend_TD is None else addend_TD.contiguous(), grad_TD, T, D,
            tokens.scale.shape[0], E=E, HAS_ADDEND=has_addend, **tokens.flags,
            TERMS=gradient_terms(tokens.x.dtype), BT=tile.tokens, BD=tile.features, BE=tile.experts,
            ALL_EXPERTS=tile.experts >= E, STEPS=tile.steps, TOKEN_MAJOR=tile.token_major,
            PREFETCH=tile.prefetch_addend,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return grad_TD


def embedding_gradient(
    tokens: Tokens,
    end: Tensor | None,
    grad_ZTE: Tensor,
    dtype: torch.dtype = torch.float32,
    result: torch.dtype = torch.float32,
    kept_TD: Tensor | None = None,
) -> Tensor:
    """Return d embedding (E, D), rounded to the dtype `result`.

    end: (C + 1,) slot after the last token of each cluster, if tokens are sorted. dtype: the
    embedding's, to which the caller rounds the gradient. Where that is bf16, as the tokens are, and
    tokens are rescaled first (rescale.py), x * scale is rounded to bf16. This moves the gradient by
    about as much as the rounding of x itself, and as its own rounding to bf16. kept_TD: these
    rounded products, if the forward pass kept them (many_experts.py).
    """
    T, D = tokens.x.shape
    Z, _, E = grad_ZTE.shape
    if kept_TD is not None:
        tokens = tokens.in_place()._replace(x=kept_TD)
    elif worth_rescaling(tokens, E):
        tokens = rescaled(tokens, 1 if tokens.x.dtype == dtype == torch.bfloat16 else 2)
    token_parts = 2 if tokens.is_split else int(tokens.is_sorted or not tokens.has_scale)
    tile = embedding_launch_table(E, D, Z, token_parts)
    blocks = cdiv(D, tile.features), cdiv(E, tile.experts)
    # Sorted tokens are gathered from scattered rows, and narrow models have short rows: both are
    # bound by latency, which twice the programs hide (sorted tokens of olmoe 99 -> 68 us).
    programs = 2 * PROGRAMS if D < 1024 or end is not None else PROGRAMS
    P, split = split_tokens(T, blocks[0] * blocks[1], tile.tokens, programs, most=64)
    partial_PED = grad_ZTE.new_empty(P, E, D, dtype=torch.float32)
    launch(
        _embedding_kernel, (P, *blocks), *tokens.pointers,
        tokens.permutation if end is None else end, grad_ZTE, partial_PED, T, D,
        tokens.scale.shape[0], split, E=E,
        **tokens.flags, SPLIT=tokens.is_split, TERMS=gradient_terms(tokens.x.dtype), BT=tile.tokens,
        BD=tile.features, BE=tile.experts, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return reduce_partials(partial_PED.view(1, P, E * D), result)[0].view(E, D)


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
    out_ptr, T, D, C, E: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr, SORTED: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr, STEPS: tl.constexpr, TOKEN_MAJOR: tl.constexpr,
    PREFETCH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Write d x of BT tokens at STEPS blocks of BD features, plus the addend, if there is one.

    ALL_EXPERTS: BE covers all experts, so that d affinity is loaded once for all blocks of
    features. TOKEN_MAJOR, PREFETCH: `token_major` and `prefetch_addend` of `Tile`.
    """
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
        if HAS_SCALE and not (SORTED or ALL_EXPERTS):  # likewise
            scale = load_own_scale(scale_ptr, cluster, unmasked, d, D)
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
        elif HAS_SCALE and ALL_EXPERTS:
            acc *= load_own_scale(scale_ptr, cluster, unmasked, d, D)
        elif HAS_SCALE:
            acc *= scale
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
    x_ptr, scale_ptr, cluster_ptr, mask_ptr, perm_ptr, end_ptr, grad_ptr, out_ptr, T, D, C,
    split, E: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr, SORTED: tl.constexpr,
    SPLIT: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the partial sum of d embedding, at BE experts and BD features, over a share of tokens.

    split: tokens of a program, if they are not sorted. SPLIT: x holds the bf16x2 split of x * scale
    (rescale.py).
    """
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
        if SPLIT:
            high, middle = load_split(x_ptr, row, unmasked, d, D, BT)
            low = high  # not read
        else:
            x = load_scaled(
                x_ptr, scale_ptr, cluster, t, row, unmasked, d, D, HAS_SCALE, SORTED, BT
            )
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
