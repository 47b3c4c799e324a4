"""The gradient of a router: affinities, then tokens and embeddings.

    d affinity    from the gate, the summed gates of the balance loss and the affinities, written as
                  2 or 3 bf16 pieces (kernels/products.py), which the other two multiply
    d x           (d affinity @ embedding) * scale of the token's cluster
    d embedding   d affinity^T @ (x * scale), in partial sums over splits of the tokens: no atomics
The scale is a constant here. Of sorted tokens a block has one, which multiplies its product instead
of every token. Floors: T E float32 read and 2 or 3 T E bf16 written; x's bytes written; x's bytes
read.

T tokens, D features, E experts, C clusters, K experts per token, N token blocks, P splits,
Z pieces.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.affinity import softmax_rows
from acmoe.kernels.dispersion import PROGRAMS, split_tokens
from acmoe.kernels.products import accurate_dot, in_three, pieces
from acmoe.kernels.tokens import Tokens, load_scale, load_scaled, load_tokens
from acmoe.kernels.total import totals


class Tile(NamedTuple):
    tokens: int
    features: int
    experts: int
    num_warps: int
    num_stages: int


def affinity_table(num_experts: int) -> Tile:
    """One program sees all experts of its tokens."""
    experts = max(16, triton.next_power_of_2(num_experts))
    return Tile(min(64, 4096 // experts), 0, experts, 4, 1)


def token_table(num_experts: int, in_order: bool) -> Tile:
    """Up to 64 experts are one step of the product: nothing to load ahead.

    A block of sorted tokens is half as high, and takes half the warps.
    """
    experts = min(64, max(16, triton.next_power_of_2(num_experts)))
    height, num_warps = (128, 8) if in_order else (64, 4)
    return Tile(height, 64, experts, num_warps, 1 if num_experts <= 64 else 2)


def embedding_table(num_experts: int, dim: int) -> Tile:
    """4 warps up to 64 experts: 8 took 86 us for 50, and 217 for 146 with a scale (H200, olmoe).

    A sorted token is two loads in turn, of its place and of itself: of three stages one load of x
    is under way, of five two (switch: 15.3 -> 12.7 us). For more experts these fill the memory.
    """
    experts = min(128, max(16, triton.next_power_of_2(num_experts)))
    if dim < 1024 and experts == 16:
        return Tile(64, 64, experts, 4, 5)
    return Tile(64, 32 if dim < 1024 else 64, experts, 8 if experts == 128 else 4, 3)


def terms(dtype: torch.dtype) -> int:
    """Products per product: the gradient of a 16-bit token is rounded to far less than 3 leave."""
    return 6 if dtype == torch.float32 else 3


def affinity_gradient(
    grad_gate_TK: Tensor | None,
    grad_affinity_TE: Tensor | None,
    grad_sum_E: Tensor | None,
    ids_TK: Tensor,
    gate_TK: Tensor,
    affinity_TE: Tensor,
    mask_T: Tensor | None,
    over_selected: bool,
    temperature: float,
    num_pieces: int,
) -> tuple[Tensor, Tensor]:
    """d affinity (Z, T, E) in bf16 pieces, and what its blocks sum to over their tokens (N, E)."""
    T, E = affinity_TE.shape
    K = ids_TK.shape[1]
    tile = affinity_table(E)
    N = triton.cdiv(T, tile.tokens)
    grad_ZTE = affinity_TE.new_empty(num_pieces, T, E, dtype=torch.bfloat16)
    partial_NE = affinity_TE.new_empty(N, E)
    given = [grad_gate_TK, grad_affinity_TE, grad_sum_E]
    pointers = [affinity_TE if grad is None else grad.contiguous() for grad in given]
    if T > 0:
        _affinity_kernel[(N,)](
            *pointers, ids_TK, gate_TK, affinity_TE,
            affinity_TE if mask_T is None else mask_T.contiguous().view(torch.uint8), grad_ZTE,
            partial_NE, T, E, 1.0 / temperature, K=K, SELECTED=over_selected,
            HAS_GATE=given[0] is not None, HAS_AFFINITY=given[1] is not None,
            HAS_SUM=given[2] is not None, HAS_MASK=mask_T is not None, BT=tile.tokens,
            BE=tile.experts, BK=max(2, triton.next_power_of_2(K)), num_warps=tile.num_warps,
            PIECES=num_pieces,
        )  # fmt: skip
    return grad_ZTE, partial_NE


def token_gradient(
    tokens: Tokens, grad_ZTE: Tensor, embedding_ED: Tensor, other_TD: Tensor | None = None
) -> Tensor:
    """d x (T, D), in x's dtype; other_TD is what comes to x from elsewhere, to be added."""
    T, D = tokens.x.shape
    E = grad_ZTE.shape[2]
    tile = token_table(E, not tokens.has_order)
    grad_TD = torch.empty_like(tokens.x)
    if T > 0:
        _token_kernel[(tokens.blocks(tile.tokens), triton.cdiv(D, tile.features))](
            *tokens.pointers, grad_ZTE, embedding_ED.contiguous(),
            grad_TD if other_TD is None else other_TD.contiguous(), grad_TD, T, D, E,
            tokens.scale.shape[0], HAS_OTHER=other_TD is not None, **tokens.flags,
            TERMS=terms(tokens.x.dtype), BT=tile.tokens, BD=tile.features, BE=tile.experts,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return grad_TD


def embedding_gradient(tokens: Tokens, end: Tensor | None, grad_ZTE: Tensor) -> Tensor:
    """d embedding (E, D), float32. end: (C + 1,) where the clusters of sorted tokens end."""
    T, D = tokens.x.shape
    E = grad_ZTE.shape[2]
    tile = embedding_table(E, D)
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
def _affinity_kernel(
    grad_gate_ptr, grad_affinity_ptr, grad_sum_ptr, ids_ptr, gate_ptr, affinity_ptr, mask_ptr,
    out_ptr, partial_ptr, T, E, inverse_temperature, K: tl.constexpr, SELECTED: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_AFFINITY: tl.constexpr, HAS_SUM: tl.constexpr,
    HAS_MASK: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    kept = t < T
    if HAS_MASK:
        kept &= tl.load(mask_ptr + t, mask=kept, other=0) != 0
    known = (t[:, None] < T) & (e[None, :] < E)
    at = t.to(tl.int64)[:, None] * E + e[None, :]
    affinity = tl.load(affinity_ptr + at, mask=known, other=0.0)
    affinity = tl.where(e[None, :] < E, affinity, float("-inf"))
    grad = tl.zeros((BT, BE), dtype=tl.float32)
    if HAS_GATE:
        wanted = _gate_gradient(grad_gate_ptr, ids_ptr, gate_ptr, t, e, T, K, SELECTED, BT, BE, BK)
        if SELECTED:
            grad += wanted
        else:
            gate = softmax_rows(affinity)
            grad += gate * (wanted - tl.sum(gate * wanted, axis=1)[:, None])
    if HAS_SUM:
        wanted = tl.load(grad_sum_ptr + e, mask=e < E, other=0.0)[None, :]
        share = softmax_rows(affinity * inverse_temperature)
        slope = share * (wanted - tl.sum(share * wanted, axis=1)[:, None]) * inverse_temperature
        grad += tl.where(kept[:, None], slope, 0.0)
    if HAS_AFFINITY:
        grad += tl.load(grad_affinity_ptr + at, mask=known, other=0.0)
    grad = tl.where(known, grad, 0.0)
    high, middle, low = in_three(grad)
    size = (tl.full((), 0, dtype=tl.int64) + T) * E
    tl.store(out_ptr + at, high, mask=known)
    tl.store(out_ptr + size + at, middle, mask=known)
    if PIECES == 3:
        tl.store(out_ptr + 2 * size + at, low, mask=known)
    tl.store(partial_ptr + tl.program_id(0) * E + e, tl.sum(grad, axis=0), mask=e < E)


@triton.jit
def _gate_gradient(
    grad_ptr, ids_ptr, gate_ptr, t, e, T, K: tl.constexpr, SELECTED: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(BT, BE): at each chosen expert the gradient of its affinity (SELECTED) or of its gate."""
    row = t.to(tl.int64) * K
    k = tl.arange(0, BK)
    known = (t[:, None] < T) & (k[None, :] < K)
    grad = tl.load(grad_ptr + row[:, None] + k[None, :], mask=known, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] + k[None, :], mask=known, other=0.0)
    mean = tl.sum(grad * gate, axis=1)
    spread = tl.zeros((BT, BE), dtype=tl.float32)
    for i in range(0, K):
        expert = tl.load(ids_ptr + row + i, mask=t < T, other=-1)
        value = tl.load(grad_ptr + row + i, mask=t < T, other=0.0)
        if SELECTED:
            value = (value - mean) * tl.load(gate_ptr + row + i, mask=t < T, other=0.0)
        spread += tl.where(e[None, :] == expert[:, None], value[:, None], 0.0)
    return spread


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
    x_ptr, scale_ptr, assignment_ptr, mask_ptr, place_ptr, grad_ptr, embedding_ptr, other_ptr,
    out_ptr, T, D, E, C, HAS_OTHER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr,
    SORTED: tl.constexpr, PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BT
    t, exists, kept, cluster = load_tokens(
        assignment_ptr, mask_ptr, place_ptr, start, T, C, HAS_SCALE, HAS_MASK, SORTED, BT
    )
    if SORTED:
        if tl.max(t) < 0:
            return
    row = start.to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    row_ptr = _rows_of(grad_ptr, t, row, E, SORTED, BT)
    total = tl.zeros((BT, BD), dtype=tl.float32)
    for begin in range(0, E, BE):
        e = begin + tl.arange(0, BE)
        known = kept[:, None] & (e[None, :] < E)
        grad_high, grad_middle, grad_low = _load_pieces(
            row_ptr[:, None] + e[None, :], known, T, E, TERMS
        )
        known = (e[:, None] < E) & (d[None, :] < D)
        weight = tl.load(embedding_ptr + e[:, None] * D + d[None, :], mask=known, other=0.0)
        high, middle, low = pieces(weight.to(tl.float32), False)
        total += accurate_dot(
            grad_high, grad_middle, grad_low, high, middle, low, False, False, TERMS
        )  # fmt: skip
    if SORTED:
        total *= load_scale(scale_ptr, cluster, d, D)[None, :]
        at = t.to(tl.int64)[:, None] * D + d[None, :]
    else:
        if HAS_SCALE:
            known = (kept & (cluster >= 0))[:, None] & (d[None, :] < D)
            total *= tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=known, other=1.0)
        out_ptr += row * D
        other_ptr += row * D
        at = tl.arange(0, BT)[:, None] * D + d[None, :]
    known = exists[:, None] & (d[None, :] < D)
    if HAS_OTHER:
        total += tl.load(other_ptr + at, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=known)


@triton.jit
def _embedding_kernel(
    x_ptr, scale_ptr, assignment_ptr, mask_ptr, place_ptr, end_ptr, grad_ptr, out_ptr, T, D, E, C,
    split, HAS_SCALE: tl.constexpr, HAS_MASK: tl.constexpr, SORTED: tl.constexpr,
    PLAIN_BF16: tl.constexpr, TERMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    size, count = split, T
    if SORTED:  # only the device knows how many places are taken
        count = tl.load(end_ptr + C)
        size = tl.cdiv(tl.cdiv(count, BT), tl.num_programs(0)) * BT
    begin = tl.program_id(0) * size
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    total = tl.zeros((BE, BD), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + size, count), BT):
        row = tl.full((), 0, dtype=tl.int64) + start
        t, _, kept, cluster = load_tokens(
            assignment_ptr, mask_ptr, place_ptr, start, T, C, HAS_SCALE, HAS_MASK, SORTED, BT
        )
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
            product *= load_scale(scale_ptr, cluster, d, D)[None, :]
        total += product
    at = (tl.program_id(0).to(tl.int64) * E + e)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, total, mask=(e[:, None] < E) & (d[None, :] < D))
