"""Gradients of attention to a sliding window. Scores and dropout are computed again, once.

    delta     output times its gradient, summed for each query
    keys      one program a tile of keys walks over the queries that see it: dk, dv, and the
              gradient of the skewed scores, each written over the score it came from
    queries   their products with keys and table: dq, in attention_queries.py

One more product carries the scores' gradient on to the table. No atomics: equal inputs give equal
bits. Shapes as in attention.py, the skew in attention_skew.py.

With dropout a kept weight w counts 1 / (1 - dropout) times. This factor, and the scale of a score,
are the same for every entry, so they are left out of what is written and multiply the finished
sums: with delta' = (1 - dropout) * delta, a score's gradient is w * kept * dweight - w * delta',
all of it times scale / (1 - dropout).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.attention.triton.forward import (
    LOG2E,
    as_runs,
    blocks_for,
    choices,
    in_window,
    load_numbers,
    load_rows,
    place_of,
    spread_of_keys,
    strides_of,
)
from acmoe.ops.attention.triton.output import empty_output, output_places
from acmoe.ops.attention.triton.queries import queries_gradient
from acmoe.ops.attention.triton.skew import (
    COMB,
    Band,
    add_shifted,
    comb,
    geometry,
    score_offsets,
    shifted_tables,
    skewed_scores,
    whole_rows,
)
from acmoe.ops.device.dot import as_number, dot
from acmoe.ops.device.dropout_rng import pair_threshold, survives_paired


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, num_heads, L, share,
    FEATURES: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`share` times the sum of products."""
    x = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    p = tl.arange(0, P)
    known = (i < L)[:, None] & (p < FEATURES)[None, :]
    out_ptrs = output_places(out_ptr, x, i, p, num_heads, L, FEATURES)
    out = tl.load(out_ptrs, mask=known, other=0.0).to(tl.float32)
    grad_ptrs = output_places(grad_ptr, x, i, p, num_heads, L, FEATURES)
    grad = tl.load(grad_ptrs, mask=known, other=0.0).to(tl.float32)
    tl.store(delta_ptr + x * L + i, tl.sum(out * grad, axis=1) * share, mask=i < L)


@triton.jit
def query_runs(j0, S, L, span, BM: tl.constexpr, BN: tl.constexpr):
    """Where a tile of keys finds the queries that see it; see `as_runs`."""
    start = tl.maximum(j0 + 1 - S, 0) // BM * BM
    end = tl.minimum(j0 + BN + span - S, L)
    inner = tl.maximum(start, (tl.maximum(j0 + BN - S, 0) + BM - 1) // BM * BM)
    outer = tl.maximum(tl.minimum(j0 + span - S + 1, L), 0) // BM * BM
    return as_runs(start, inner, tl.maximum(inner, outer), end, BM)


@triton.jit
def _by_query(
    i0, k, v, q_base, grad_base, scores, bits_base, lse_base, delta_base, seen, spread, j,
    p, dk, dv, L, S, span, columns, steep,
    INTERIOR: tl.constexpr, HAS_MASK: tl.constexpr, DROPPED: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to the gradients of a tile of keys and values."""
    i0 = tl.multiple_of(i0, BM)
    m = tl.arange(0, BM)
    i = i0 + m
    q = load_rows(q_base, i0, m, p, L, P, INTERIOR, P)
    grad = load_rows(grad_base, i0, m, p, L, P, INTERIOR, P)
    lse = load_numbers(lse_base, i0, m, L, INTERIOR)
    delta = load_numbers(delta_base, i0, m, L, INTERIOR)
    # Eight queries on is one row on, and one comb to the left.
    score_ptrs = scores + i0 // COMB * (columns - COMB).to(tl.int64)
    window = in_window(i, j, S, L, span)
    if INTERIOR:
        score = tl.load(score_ptrs)
    else:
        score = tl.load(score_ptrs, mask=(i < L)[:, None], other=0.0)
    score = dot(q, k.T, score.to(tl.float32))
    dweight = dot(grad, v.T, tl.zeros((BM, BN), tl.float32))
    weight = tl.exp2(score * steep - lse[:, None])
    if not INTERIOR:
        weight = tl.where(window, weight, 0.0)
    if HAS_MASK:
        weight = tl.where(seen[None, :], weight, 0.0)
    left = weight
    if DROPPED > 0:
        bits = load_numbers(bits_base, i0, m, L, INTERIOR)
        kept = survives_paired(bits[:, None], spread[None, :], DROPPED)
        left = weight * as_number(kept, tl.float32)
    dscore = (left * dweight - weight * delta[:, None]).to(q.dtype)
    dv = dot(left.to(q.dtype).T, grad, dv)
    if INTERIOR:  # whole lines of 16 bytes; a mask would write number by number
        tl.store(score_ptrs, dscore)
    else:
        tl.store(score_ptrs, dscore, mask=window)
    return dot(dscore.T, q, dk), dv


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, bits_ptr, spread_ptr, grad_ptr, lse_ptr, delta_ptr,
    dk_ptr, dv_ptr, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, num_heads_rows, num_rows, columns, shift, steep, dk_scale, dv_scale,
    HAS_MASK: tl.constexpr, DROPPED: tl.constexpr, STORED: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk, dv, and the scores' gradient in their place: every entry of a window is visited once."""
    x = tl.program_id(1).to(tl.int64)
    j0 = tl.program_id(0) * BN
    n = tl.arange(0, BN)
    j = j0 + n
    p = tl.arange(0, P)
    known = j < N
    S = N - L
    k_start = x // num_heads * k_batch + x % num_heads * k_head
    v_start = x // num_heads * v_batch + x % num_heads * v_head
    k = load_rows(k_ptr + k_start, j0, n, p, N, k_stride, False, STORED)
    v = load_rows(v_ptr + v_start, j0, n, p, N, v_stride, False, STORED)
    seen = known
    if HAS_MASK:
        seen = tl.load(mask_ptr + x // num_heads * N + j, mask=known, other=0) != 0
    # Loaded: computed here, half of it would be computed again in every round of the loop.
    spread = tl.load(spread_ptr + j, mask=known, other=0) if DROPPED > 0 else j
    first = score_offsets(x, tl.arange(0, BM), num_heads_rows, num_rows, columns, shift)
    scores = score_ptr + first[:, None] + j[None, :]
    dk = tl.zeros((BN, P), tl.float32)
    dv = tl.zeros((BN, P), tl.float32)
    runs = query_runs(j0, S, L, span, BM, BN)
    for INTERIOR in tl.static_range(2):
        low, high = runs[2 * INTERIOR], runs[2 * INTERIOR + 1]
        for at in tl.range(low, high, BM if INTERIOR else 1, num_stages=STAGES):
            dk, dv = _by_query(
                place_of(at, runs, BM, INTERIOR), k, v, q_ptr + x * L * P,
                grad_ptr + x * L * P, scores, bits_ptr + x * L, lse_ptr + x * L, delta_ptr + x * L,
                seen, spread, j, p, dk, dv, L, S, span, columns, steep,
                INTERIOR, HAS_MASK, DROPPED, P, BM, BN,
            )  # fmt: skip
    kind = dk_ptr.dtype.element_ty
    place = j[:, None].to(tl.int64)
    dk_ptrs = dk_ptr + k_start + place * k_stride + p[None, :]
    dv_ptrs = dv_ptr + v_start + place * v_stride + p[None, :]
    stored = known[:, None] & (p < STORED)[None, :]
    tl.store(dk_ptrs, (dk * dk_scale).to(kind), mask=stored)
    tl.store(dv_ptrs, (dv * dv_scale).to(kind), mask=stored)


def delta_of(out: Tensor, grad: Tensor, share: float) -> Tensor:
    """(B, H, L) float32, of two tensors as `empty_output` has them."""
    delta = torch.empty(out.shape[:3], device=out.device)
    batch, heads, num_queries, features = out.shape
    delta_kernel[(batch * heads, triton.cdiv(num_queries, 64))](
        *(out, grad, delta, heads, num_queries, share),
        FEATURES=features,
        P=triton.next_power_of_2(features),
        BM=64,
        num_warps=4,
    )
    return delta


def table_gradient(q_8RP: Tensor, dscore_8RC: Tensor) -> Tensor:
    """(8, P, C) float32 sums over all queries."""
    if q_8RP.is_cuda and q_8RP.dtype != torch.float32:
        return torch.bmm(q_8RP.mT, dscore_8RC, out_dtype=torch.float32)
    return torch.bmm(q_8RP.float().mT, dscore_8RC.float())


def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    out: Tensor,
    lse: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    dropout: float,
    features: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of `features` of the queries and of the table; dk and dv are filled.

    The first like grad and out, which are as wide as k: as `empty_output` has them.
    """
    batch, heads, num_queries, width = q.shape
    band = Band(heads, num_queries, k.shape[2], table.shape[1])
    dq = empty_output(q, features)
    assert strides_of(dk, dv) == strides_of(k, v)
    dtable = torch.zeros(table.shape, device=q.device)
    table_8PC = shifted_tables(table, band, q.dtype)
    share = 1 - pair_threshold(dropout) / 2**32  # of probabilities kept
    delta = delta_of(out, grad, share)
    more = width - grad.shape[3]  # padding by nothing would copy as well
    grad = (F.pad(grad, (0, more)) if more else grad).contiguous()
    spread = spread_of_keys(band.keys, dropout, q.device)
    blocks = blocks_for("attention_keys", q.dtype, width)
    for some in band.groups(batch, q.element_size()):
        q_8RP = comb(whole_rows(q[some], band))
        scores = skewed_scores(q_8RP, table_8PC)
        mask = q if key_mask is None else key_mask[some].to(torch.uint8)
        num = q[some].shape[0] * heads
        rest = (bits[some], spread, grad[some], lse[some], delta[some], dk[some], dv[some])
        keys_kernel[(triton.cdiv(band.keys, blocks.n), num)](
            *(q[some], k[some], v[some], scores, mask, *rest),
            *(*strides_of(k, v), *geometry(band, num), scale * LOG2E, scale / share, 1 / share),
            STORED=k.shape[3],
            **choices(blocks, key_mask, dropout),
        )
        dscores = scores  # the same memory
        queries_gradient(k[some], table_8PC, dscores, dq[some], band, scale / share, features)
        add_shifted(dtable, table_gradient(q_8RP, dscores), band, scale / share)
    return dq, dtable.to(table.dtype)
