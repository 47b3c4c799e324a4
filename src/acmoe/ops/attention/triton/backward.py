"""Sliding-window attention with relative positions: backward pass that recomputes the scores.

Three kernels and one GEMM compute the gradients; definitions and shapes are those of forward.py:

    delta_kernel     delta = keep_prob * rowsum(out * grad_out), FlashAttention's D
    keys_kernel      one program per tile of BN keys and per head loops over the tiles of queries
                     that see it: dk = dscore^T @ q and dv = (prob * keep_mask)^T @ grad_out; each
                     dscore overwrites its relative-position score in the skewed buffer of skew.py
    queries_kernel   dq from the stored dscore, in queries.py
    torch.bmm        gradient of the relative-position embedding, q^T @ dscore

Scores, probabilities and the dropout mask are recomputed once, in keys_kernel. There are no
atomics: equal inputs give bitwise equal gradients.

With dropout, a probability that is kept is multiplied by 1 / keep_prob. This factor and the scale
of the scores are common to all elements, so the kernels leave them out of dscore and apply them to
the final sums: with dprob = grad_out @ v^T, dscore = prob * keep_mask * dprob - prob * delta, to be
multiplied by scale / keep_prob.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.triton.forward import (
    LOG2E,
    blocks_for,
    dropout_key_bits,
    in_window,
    kv_strides,
    load_rows,
    load_vector,
    softmax_options,
    split_ranges,
    tile_start,
)
from acmoe.ops.attention.triton.output import empty_output, output_ptrs
from acmoe.ops.attention.triton.queries import queries_gradient
from acmoe.ops.attention.triton.skew import (
    SKEW,
    SkewLayout,
    add_shifted_gradient,
    layout_arguments,
    pad_queries,
    query_planes,
    score_offsets,
    shift_rel_emb,
    skewed_position_scores,
)
from acmoe.ops.device.dot import dot, mask_to_dtype
from acmoe.ops.device.dropout_rng import drop_threshold_paired, keep_mask_paired


@triton.jit
def delta_kernel(
    out_ptr, grad_out_ptr, delta_ptr, num_heads, L, keep_prob,
    OUT_DIM: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta = keep_prob * rowsum(out * grad_out) of BM queries of one head."""
    x = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    p = tl.arange(0, P)
    in_bounds = (i < L)[:, None] & (p < OUT_DIM)[None, :]
    out_ptrs = output_ptrs(out_ptr, x, i, p, num_heads, L, OUT_DIM)
    out = tl.load(out_ptrs, mask=in_bounds, other=0.0).to(tl.float32)
    grad_ptrs = output_ptrs(grad_out_ptr, x, i, p, num_heads, L, OUT_DIM)
    grad_out = tl.load(grad_ptrs, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(delta_ptr + x * L + i, tl.sum(out * grad_out, axis=1) * keep_prob, mask=i < L)


@triton.jit
def query_tile_ranges(j0, S, L, span, BM: tl.constexpr, BN: tl.constexpr):
    """Compute the ranges of query tiles that see a tile of keys; see `split_ranges`."""
    start = tl.maximum(j0 + 1 - S, 0) // BM * BM
    end = tl.minimum(j0 + BN + span - S, L)
    inner = tl.maximum(start, (tl.maximum(j0 + BN - S, 0) + BM - 1) // BM * BM)
    outer = tl.maximum(tl.minimum(j0 + span - S + 1, L), 0) // BM * BM
    return split_ranges(start, inner, tl.maximum(inner, outer), end, BM)


@triton.jit
def _accumulate_query_tile(
    i0, k, v, q_base, grad_base, row_ptrs, bits_base, lse_base, delta_base, visible, key_bits, j,
    p, dk, dv, L, S, span, pitch, scale_log2,
    INTERIOR: tl.constexpr, HAS_MASK: tl.constexpr, THRESHOLD: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv of a tile of keys, and store its dscore."""
    i0 = tl.multiple_of(i0, BM)
    m = tl.arange(0, BM)
    i = i0 + m
    q = load_rows(q_base, i0, m, p, L, P, INTERIOR, P)
    grad_out = load_rows(grad_base, i0, m, p, L, P, INTERIOR, P)
    lse = load_vector(lse_base, i0, m, L, INTERIOR)
    delta = load_vector(delta_base, i0, m, L, INTERIOR)
    # Eight queries further is one row further, and 8 columns to the left.
    score_ptrs = row_ptrs + i0 // SKEW * (pitch - SKEW).to(tl.int64)
    window = in_window(i, j, S, L, span)
    if INTERIOR:
        score = tl.load(score_ptrs)
    else:
        score = tl.load(score_ptrs, mask=(i < L)[:, None], other=0.0)
    score = dot(q, k.T, score.to(tl.float32))
    dprob = dot(grad_out, v.T, tl.zeros((BM, BN), tl.float32))
    prob = tl.exp2(score * scale_log2 - lse[:, None])
    if not INTERIOR:
        prob = tl.where(window, prob, 0.0)
    if HAS_MASK:
        prob = tl.where(visible[None, :], prob, 0.0)
    kept_prob = prob
    if THRESHOLD > 0:
        query_bits = load_vector(bits_base, i0, m, L, INTERIOR)
        keep_mask = keep_mask_paired(query_bits[:, None], key_bits[None, :], THRESHOLD)
        kept_prob = prob * mask_to_dtype(keep_mask, tl.float32)
    dscore = (kept_prob * dprob - prob * delta[:, None]).to(q.dtype)
    dv = dot(kept_prob.to(q.dtype).T, grad_out, dv)
    if INTERIOR:  # stores of 16 bytes; a mask would store element by element
        tl.store(score_ptrs, dscore)
    else:
        tl.store(score_ptrs, dscore, mask=window)
    return dot(dscore.T, q, dk), dv


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, score_ptr, mask_ptr, query_bits_ptr, key_bits_ptr, grad_out_ptr, lse_ptr,
    delta_ptr, dk_ptr, dv_ptr, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    num_heads, L, N, span, total_rows, num_rows, pitch, key0_block, scale_log2, dk_scale, dv_scale,
    HAS_MASK: tl.constexpr, THRESHOLD: tl.constexpr, KV_DIM: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BN keys of one head, and replace the scores they meet by dscore.

    Every (query, key) element of a window is visited exactly once over all programs.
    """
    x = tl.program_id(1).to(tl.int64)
    j0 = tl.program_id(0) * BN
    n = tl.arange(0, BN)
    j = j0 + n
    p = tl.arange(0, P)
    is_key = j < N
    S = N - L
    k_start = x // num_heads * k_batch + x % num_heads * k_head
    v_start = x // num_heads * v_batch + x % num_heads * v_head
    k = load_rows(k_ptr + k_start, j0, n, p, N, k_stride, False, KV_DIM)
    v = load_rows(v_ptr + v_start, j0, n, p, N, v_stride, False, KV_DIM)
    visible = is_key
    if HAS_MASK:
        visible = tl.load(mask_ptr + x // num_heads * N + j, mask=is_key, other=0) != 0
    # Loaded, not computed: the compiler would move half of the hash into the loop over queries.
    key_bits = tl.load(key_bits_ptr + j, mask=is_key, other=0) if THRESHOLD > 0 else j
    offsets = score_offsets(x, tl.arange(0, BM), total_rows, num_rows, pitch, key0_block)
    row_ptrs = score_ptr + offsets[:, None] + j[None, :]
    dk = tl.zeros((BN, P), tl.float32)
    dv = tl.zeros((BN, P), tl.float32)
    ranges = query_tile_ranges(j0, S, L, span, BM, BN)
    for INTERIOR in tl.static_range(2):
        low, high = ranges[2 * INTERIOR], ranges[2 * INTERIOR + 1]
        for index in tl.range(low, high, BM if INTERIOR else 1, num_stages=STAGES):
            dk, dv = _accumulate_query_tile(
                tile_start(index, ranges, BM, INTERIOR), k, v, q_ptr + x * L * P,
                grad_out_ptr + x * L * P, row_ptrs, query_bits_ptr + x * L, lse_ptr + x * L,
                delta_ptr + x * L, visible, key_bits, j, p, dk, dv, L, S, span, pitch, scale_log2,
                INTERIOR, HAS_MASK, THRESHOLD, P, BM, BN,
            )  # fmt: skip
    out_dtype = dk_ptr.dtype.element_ty
    row = j[:, None].to(tl.int64)
    dk_ptrs = dk_ptr + k_start + row * k_stride + p[None, :]
    dv_ptrs = dv_ptr + v_start + row * v_stride + p[None, :]
    in_bounds = is_key[:, None] & (p < KV_DIM)[None, :]
    tl.store(dk_ptrs, (dk * dk_scale).to(out_dtype), mask=in_bounds)
    tl.store(dv_ptrs, (dv * dv_scale).to(out_dtype), mask=in_bounds)


def compute_delta(out: Tensor, grad_out: Tensor, keep_prob: float) -> Tensor:
    """Return (B, H, L) float32 delta; out and grad_out are laid out by `empty_output`."""
    delta = torch.empty(out.shape[:3], device=out.device)
    batch, heads, num_queries, features = out.shape
    delta_kernel[(batch * heads, triton.cdiv(num_queries, 64))](
        *(out, grad_out, delta, heads, num_queries, keep_prob),
        OUT_DIM=features,
        P=triton.next_power_of_2(features),
        BM=64,
        num_warps=4,
    )
    return delta


def rel_emb_gradient(q_8RP: Tensor, dscore_8RC: Tensor) -> Tensor:
    """Return (8, P, C) = q^T @ dscore for each plane, summed over all queries in float32."""
    if q_8RP.is_cuda and q_8RP.dtype != torch.float32:
        return torch.bmm(q_8RP.mT, dscore_8RC, out_dtype=torch.float32)
    return torch.bmm(q_8RP.float().mT, dscore_8RC.float())


def run_backward(
    grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dq and the gradient of rel_emb, and fill dk and dv.

    dq has the first `features` of a head. grad_out and out have as many features as k. All three
    are laid out by `empty_output`.
    """
    q, k, v, rel_emb, key_mask, query_bits, scale, dropout, features = given
    batch, heads, num_queries, width = q.shape
    skew = SkewLayout(heads, num_queries, k.shape[2], rel_emb.shape[1])
    dq = empty_output(q, features)
    assert kv_strides(dk, dv) == kv_strides(k, v)
    drel_emb = torch.zeros(rel_emb.shape, device=q.device)
    rel_emb_8PC = shift_rel_emb(rel_emb, skew, q.dtype)
    keep_prob = 1 - drop_threshold_paired(dropout) / 2**32
    delta = compute_delta(out, grad_out, keep_prob)
    padding = width - grad_out.shape[3]  # F.pad copies even where it adds nothing
    grad_out = (F.pad(grad_out, (0, padding)) if padding else grad_out).contiguous()
    key_bits = dropout_key_bits(skew.keys, dropout, q.device)
    blocks = blocks_for("attention_keys", q.dtype, width)
    for part in skew.batch_slices(batch, q.element_size()):
        q_8RP = query_planes(pad_queries(q[part], skew))
        scores = skewed_position_scores(q_8RP, rel_emb_8PC)
        mask = q if key_mask is None else key_mask[part].to(torch.uint8)
        num = q[part].shape[0] * heads
        rest = (key_bits, grad_out[part], lse[part], delta[part], dk[part], dv[part])
        keys_kernel[(triton.cdiv(skew.keys, blocks.n), num)](
            *(q[part], k[part], v[part], scores, mask, query_bits[part], *rest),
            *(*kv_strides(k, v), *layout_arguments(skew, num)),
            *(scale * LOG2E, scale / keep_prob, 1 / keep_prob),
            KV_DIM=k.shape[3],
            **softmax_options(blocks, key_mask, dropout),
        )
        dscores = scores  # keys_kernel has overwritten the scores
        queries_gradient(k[part], rel_emb_8PC, dscores, dq[part], skew, scale / keep_prob, features)
        add_shifted_gradient(drel_emb, rel_emb_gradient(q_8RP, dscores), skew, scale / keep_prob)
    return dq, drel_emb.to(rel_emb.dtype)
