"""Attention of each token to a sliding window of the tokens before it.

Two forms. With a table of learned relative positions (the paper's) a query sees the `span` tokens
before it and not itself; without a table (rotary positions) it sees itself and the span - 1 before.

Shapes: B batch, H heads, L queries, S keys before the first query, N = S + L keys,
W distances in reach, P features of a head, Q = N + 1 columns of the skewed buffer.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.attention.op import fused_window_attention
from acmoe.ops.attention.support import stored_width, window_attention_obstacle
from acmoe.ops.dispatch import Option, choose

_SHORTEST_PIECE = 64  # queries; shorter pieces cost more in launches than they save in scores


def window_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    table: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The definition `window_attention` is tested against: every score, then a mask."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    query_L = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    distance_LN = query_L[:, None] - torch.arange(num_keys, device=q.device)
    nearest = 0 if table is None else 1
    allowed_LN = (distance_LN >= nearest) & (distance_LN < nearest + span)
    score_BHLN = q @ k.mT
    if table is not None:
        column_LN = (span - distance_LN).clamp(0, span - 1)  # the last column is distance 1
        score_BHLN = score_BHLN + (q @ table).gather(-1, column_LN.expand_as(score_BHLN))
    allowed = allowed_LN if key_mask is None else allowed_LN & key_mask[:, None, None, :]
    score_BHLN = (score_BHLN / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    # A query with nothing to see gets zeros, where softmax alone would say NaN.
    return torch.where(allowed, score_BHLN.softmax(-1), 0.0) @ v


def joined_width(q: Tensor, table: Tensor | None, dropout: float) -> int | None:
    """Features of a head in the one tensor of keys and values that `joined_window_attention` takes;
    None where `window_attention` serves these queries without it."""
    return stored_width(q.shape[-1]) if _backend(q, table, dropout) == "triton" else None


def _backend(q: Tensor, table: Tensor | None, dropout: float) -> str:
    options = (
        Option("triton", window_attention_obstacle(q, table, dropout)),
        Option("torch", None),
    )
    return choose("attention", options)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    table: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the last L of N positions to their windows.

    Args:
        q: (B, H, L, P).
        k, v: (B, H, N, P); the queries are the last L positions, and at most `span` keys precede
            the first of them.
        span: tokens in a window.
        table: (P, span) relative positions, the last column for distance 1; None: no positions.
        key_mask: (B, N) True where a key may be seen.
        dropout: share of the attention probabilities dropped.

    Returns:
        (B, H, L, P); zeros for a query that sees nothing.

    Relative positions on a GPU have a kernel of their own; everything else is torch's attention
    with a bias.
    """
    num_before = k.shape[-2] - q.shape[-2]
    assert 0 <= num_before <= span, f"{num_before} keys before a window of {span}"
    if _backend(q, table, dropout) == "triton":
        assert table is not None
        return fused_window_attention(
            q, k, v, span=span, table=table, key_mask=key_mask, dropout=dropout
        )
    return _in_pieces(q, k, v, span=span, table=table, key_mask=key_mask, dropout=dropout)


def _in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    table: Tensor | None,
    key_mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """Sequences longer than a window in parts, so that cost and memory grow with L * span."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    num_before = num_keys - num_queries
    piece = max(span, _SHORTEST_PIECE)
    pieces = []
    for first in range(0, num_queries, piece):
        end = min(first + piece, num_queries)
        reach = slice(max(0, num_before + first - span), num_before + end)
        pieces.append(
            _attend(
                q[:, :, first:end],
                k[:, :, reach],
                v[:, :, reach],
                span=span,
                table=table,
                key_mask=None if key_mask is None else key_mask[:, reach],
                dropout=dropout,
            )
        )
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    table: Tensor | None,
    key_mask: Tensor | None,
    dropout: float,
) -> Tensor:
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    num_before = num_keys - num_queries
    q = q * (1 / math.sqrt(q.shape[-1]))
    if table is None and key_mask is None and num_before == 0 and num_keys <= span:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=1.0)
    if num_keys == 1 and table is not None:
        return torch.zeros_like(q)
    seen_BL = _sees_anything(num_queries, num_keys, span, table is not None, key_mask, q.device)
    if table is None:
        bias = _window(num_queries, num_keys, span, q)
    else:
        bias = _position_bias(q, table, num_keys)
    if key_mask is not None:
        bias = bias.masked_fill(~key_mask[:, None, None, :], -math.inf)
        assert seen_BL is not None
        bias = bias.masked_fill(~seen_BL[:, None, :, None], 0.0)
    out_BHLP = _softmax_attention(q, k, v, bias, dropout)
    if seen_BL is None:
        return out_BHLP
    return out_BHLP.masked_fill(~seen_BL[:, None, :, None], 0.0)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """dropout(softmax(q . k + bias)) v; every row of the bias has a finite entry."""
    if q.device.type == "cpu" and bias.requires_grad:
        # Torch's own form for a bias with a gradient guards each row against being empty, in three
        # more passes over the scores. Here no row is.
        bias = bias.expand(*q.shape[:2], *bias.shape[-2:])
        score = torch.baddbmm(bias.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT)
        probability = F.dropout(score.softmax(-1), dropout)
        return torch.bmm(probability, v.flatten(0, 1)).view_as(q)
    features, num_keys = q.shape[-1], k.shape[-2]
    if q.is_cuda:
        # The fused kernel wants heads of a multiple of 8 features, or the slow one runs without a
        # word; zeros fill them up and change nothing. It reads the bias 16 bytes at a time and
        # faults on rows that begin elsewhere.
        q, k, v = (F.pad(t, (0, -features % 8)) for t in (q, k, v))
        if bias.storage_offset() % 8 or any(stride % 8 for stride in bias.stride()[:-1]):
            bias = F.pad(bias, (0, -num_keys % 8 or 8))[..., :num_keys]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
    return out[..., :features]


def _position_bias(q_BHLP: Tensor, table_PW: Tensor, num_keys: int) -> Tensor:
    """(B, H, L, N): query . table[distance] inside the window, -inf outside it.

    One product gives every query its W position scores, in rows one column longer than the keys.
    Read back with rows of N columns, row i is shifted by i: the scores stand under their keys
    (the skew of Music Transformer), and the fence beyond column W becomes the window's mask.
    """
    batch, heads, num_queries, features = q_BHLP.shape
    num_before = num_keys - num_queries
    reach = min(table_PW.shape[1], num_keys - 1)
    shift = reach - num_before  # position scores that fall before the first key, in row 0
    row_L1 = torch.arange(num_queries, device=q_BHLP.device)[:, None]
    column_Q = torch.arange(num_keys + 1, device=q_BHLP.device)
    open_LQ = (column_Q < reach) & (row_L1 + column_Q >= shift)
    if num_before == 0:
        # The first token sees nothing. Its own slot keeps softmax finite; the caller zeroes it.
        open_LQ |= (row_L1 == 0) & (column_Q == reach)
    fence_LQ = torch.zeros_like(open_LQ, dtype=q_BHLP.dtype).masked_fill_(~open_LQ, -math.inf)
    table_PQ = F.pad(table_PW[:, -reach:].to(q_BHLP.dtype), (0, num_keys + 1 - reach))
    score_XLQ = torch.baddbmm(
        fence_LQ[None],
        q_BHLP.reshape(-1, num_queries, features),
        table_PQ.expand(batch * heads, -1, -1),
    )
    flat = score_XLQ.view(batch, heads, -1)[..., shift : shift + num_queries * num_keys]
    return flat.view(batch, heads, num_queries, num_keys)


def _window(num_queries: int, num_keys: int, span: int, q: Tensor) -> Tensor:
    """(L, N): 0 for each query's own slot and the span - 1 before it, -inf elsewhere."""
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
    """(B or 1, L) True where a query's window holds a key; None when all of them do."""
    if key_mask_BN is None:
        if num_keys > num_queries or not exclude_self:
            return None
        return (torch.arange(num_queries, device=device) > 0)[None]
    # Keys up to the window's end, less those up to its start.
    upto_BQ = F.pad(key_mask_BN.to(torch.int32).cumsum(1), (1, 0))
    end_L = torch.arange(num_keys - num_queries, num_keys, device=device) + (not exclude_self)
    return upto_BQ[:, end_L] > upto_BQ[:, (end_L - span).clamp(min=0)]


def rotate(x_BHLP: Tensor, first: int) -> Tensor:
    """Rotary positions: turn feature pairs of row i by (first + i) * base^(-2j/P), base 10,000."""
    half = x_BHLP.shape[-1] // 2
    wide = torch.float64 if x_BHLP.dtype == torch.float64 else torch.float32
    position_L = torch.arange(first, first + x_BHLP.shape[-2], device=x_BHLP.device, dtype=wide)
    pair_J = torch.arange(half, device=x_BHLP.device, dtype=wide)
    angle_LJ = position_L[:, None] * 10_000.0 ** (-pair_J / half)
    # The angle needs float32: at position 2,000 bfloat16 would be off by whole turns.
    cos_LJ, sin_LJ = angle_LJ.cos(), angle_LJ.sin()
    left, right = x_BHLP.to(wide).chunk(2, dim=-1)
    turned = torch.cat([left * cos_LJ - right * sin_LJ, left * sin_LJ + right * cos_LJ], dim=-1)
    return turned.to(x_BHLP.dtype)
