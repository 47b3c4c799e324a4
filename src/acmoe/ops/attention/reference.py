"""Attention of each token to a sliding window of the tokens before it, in plain PyTorch.

There are two forms. With a learned relative-position embedding (the paper's form) a query sees the
`span` tokens before it and not itself. Without one (rotary positions) it sees itself and the
span - 1 tokens before it.

Shapes: B batch, H heads, L queries, S keys before the first query, N = S + L keys,
W = span, at most N - 1, P features of a head, Q = N + 1 columns of the skewed buffer.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.dispatch import op

_MIN_CHUNK = 64  # queries; shorter chunks cost more in launches than they save in scores


def window_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Compute every score, then mask. Tests compare `window_attention` with this definition."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    query_L = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    distance_LN = query_L[:, None] - torch.arange(num_keys, device=q.device)
    nearest = 0 if positions is None else 1
    allowed_LN = (distance_LN >= nearest) & (distance_LN < nearest + span)
    score_BHLN = q @ k.mT
    if positions is not None:
        column_LN = (span - distance_LN).clamp(0, span - 1)  # the last column is distance 1
        score_BHLN = score_BHLN + (q @ positions).gather(-1, column_LN.expand_as(score_BHLN))
    allowed = allowed_LN if key_mask is None else allowed_LN & key_mask[:, None, None, :]
    score_BHLN = (score_BHLN / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    # A query that sees no key gets zeros, where softmax alone would give NaN.
    return torch.where(allowed, score_BHLN.softmax(-1), 0.0) @ v


@op
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from the last L of N positions to their windows.

    Args:
        q: (B, H, L, P).
        k, v: (B, H, N, P); the queries are the last L positions, and at most `span` keys precede
            the first of them.
        span: tokens in a window.
        positions: (P, span) relative-position embedding, the last column for distance 1, or None.
        key_mask: (B, N) True where a key may be seen.
        dropout: share of the attention probabilities dropped.

    Returns:
        (B, H, L, P); zeros for a query that sees nothing.
    """
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    num_before = num_keys - num_queries
    assert 0 <= num_before <= span, f"{num_before} keys before a window of {span}"
    # A long sequence attends in chunks, so that cost and memory grow with L * span.
    chunk = max(span, _MIN_CHUNK)
    chunks = []
    for first in range(0, num_queries, chunk):
        end = min(first + chunk, num_queries)
        reach = slice(max(0, num_before + first - span), num_before + end)
        chunks.append(
            _attend(
                q[:, :, first:end],
                k[:, :, reach],
                v[:, :, reach],
                span=span,
                positions=positions,
                key_mask=None if key_mask is None else key_mask[:, reach],
                dropout=dropout,
            )
        )
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    positions: Tensor | None,
    key_mask: Tensor | None,
    dropout: float,
) -> Tensor:
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    num_before = num_keys - num_queries
    q = q * (1 / math.sqrt(q.shape[-1]))
    if positions is None and key_mask is None and num_before == 0 and num_keys <= span:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=1.0)
    if num_keys == 1 and positions is not None:
        return torch.zeros_like(q)
    seen_BL = _sees_anything(num_queries, num_keys, span, positions is not None, key_mask, q.device)
    if positions is None:
        bias = _window(num_queries, num_keys, span, q)
    else:
        bias = _position_bias(q, positions, num_keys)
    if key_mask is not None:
        bias = bias.masked_fill(~key_mask[:, None, None, :], -math.inf)
        assert seen_BL is not None
        bias = bias.masked_fill(~seen_BL[:, None, :, None], 0.0)
    out_BHLP = _softmax_attention(q, k, v, bias, dropout)
    if seen_BL is None:
        return out_BHLP
    return out_BHLP.masked_fill(~seen_BL[:, None, :, None], 0.0)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Return dropout(softmax(q . k + bias)) v; every row of the bias has a finite entry."""
    if q.device.type == "cpu" and bias.requires_grad:
        # PyTorch's own path for a bias with a gradient makes three more passes over the scores, to
        # guard against rows that are all -inf. There are none here.
        bias = bias.expand(*q.shape[:2], *bias.shape[-2:])
        score = torch.baddbmm(bias.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT)
        probability = F.dropout(score.softmax(-1), dropout)
        return torch.bmm(probability, v.flatten(0, 1)).view_as(q)
    features, num_keys = q.shape[-1], k.shape[-2]
    if q.is_cuda:
        # The fused kernel needs a head dimension that is a multiple of 8, or PyTorch runs the slow
        # kernel without a warning. Zero padding does not change the result. The fused kernel also
        # reads the bias 16 bytes at a time and faults on rows that are not so aligned.
        q, k, v = (F.pad(t, (0, -features % 8)) for t in (q, k, v))
        if bias.storage_offset() % 8 or any(stride % 8 for stride in bias.stride()[:-1]):
            bias = F.pad(bias, (0, -num_keys % 8 or 8))[..., :num_keys]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
    return out[..., :features]


def _position_bias(q_BHLP: Tensor, positions_PW: Tensor, num_keys: int) -> Tensor:
    """Return (B, H, L, N): query . positions[distance] inside the window, -inf outside it.

    One GEMM computes the W position scores of every query, in rows of N + 1 columns. Read again as
    rows of N columns, row i is shifted by i columns, so that each score is in the column of its key
    (the skewing of Music Transformer). Columns from W on hold -inf and become the window's mask.
    """
    batch, heads, num_queries, features = q_BHLP.shape
    num_before = num_keys - num_queries
    reach = min(positions_PW.shape[1], num_keys - 1)
    shift = reach - num_before  # position scores that fall before the first key, in row 0
    row_L1 = torch.arange(num_queries, device=q_BHLP.device)[:, None]
    column_Q = torch.arange(num_keys + 1, device=q_BHLP.device)
    open_LQ = (column_Q < reach) & (row_L1 + column_Q >= shift)
    if num_before == 0:
        # The first token sees no key. Unmask its own column to keep softmax finite; the caller sets
        # its output to zero.
        open_LQ |= (row_L1 == 0) & (column_Q == reach)
    mask_LQ = torch.zeros_like(open_LQ, dtype=q_BHLP.dtype).masked_fill_(~open_LQ, -math.inf)
    positions_PQ = F.pad(positions_PW[:, -reach:].to(q_BHLP.dtype), (0, num_keys + 1 - reach))
    score_XLQ = torch.baddbmm(
        mask_LQ[None],
        q_BHLP.reshape(-1, num_queries, features),
        positions_PQ.expand(batch * heads, -1, -1),
    )
    flat = score_XLQ.view(batch, heads, -1)[..., shift : shift + num_queries * num_keys]
    return flat.view(batch, heads, num_queries, num_keys)


def _window(num_queries: int, num_keys: int, span: int, q: Tensor) -> Tensor:
    """Return (L, N): 0 for each query's own position and the span - 1 before it, else -inf."""
    query_L = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    distance_LN = query_L[:, None] - torch.arange(num_keys, device=q.device)
    open_LN = (distance_LN >= 0) & (distance_LN < span)
    return torch.zeros_like(open_LN, dtype=q.dtype).masked_fill_(~open_LN, -math.inf)


def _sees_anything(
    num_queries: int,
    num_keys: int,
    span: int,
    exclude_self: bool,
    key_mask_BN: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Return (B or 1, L), True where a query sees a key; None if all queries do."""
    if key_mask_BN is None:
        if num_keys > num_queries or not exclude_self:
            return None
        return (torch.arange(num_queries, device=device) > 0)[None]
    # The unmasked keys of a window: their number up to its end, less that up to its start.
    upto_BQ = F.pad(key_mask_BN.to(torch.int32).cumsum(1), (1, 0))
    end_L = torch.arange(num_keys - num_queries, num_keys, device=device) + (not exclude_self)
    return upto_BQ[:, end_L] > upto_BQ[:, (end_L - span).clamp(min=0)]
