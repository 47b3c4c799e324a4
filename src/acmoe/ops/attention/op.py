"""Attention to a sliding window with relative positions, by Triton kernels.

The definition is `window_attention_reference` in models/text/attention.py, where one of the two is
chosen. The forward has a kernel for Hopper, and one for all others. A custom op, so that
`torch.compile(fullgraph=True)` sees one call. Kept for the backward: queries, keys, values, output
and one number a query; and where they fit the weights, which are computed again otherwise.

B streams, H heads, L queries, N keys of which they are the last, W distances in reach, P features
of a head. Keys and values are one tensor, so that one product gives them, and another takes their
gradient.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.attention.support import (
    fused_width,
    hopper_obstacle,
    keeping_obstacle,
    stored_width,
    wishes,
)
from acmoe.ops.dispatch import say_once

NO_BACKWARD = "nothing"  # to keep: no backward will come


def fused_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    table: Tensor,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the last L of N positions to the `span` keys before each of them.

    Args:
        q: (B, H, L, P) in the dtype of the products.
        k, v: (B, H, N, P) in the same; copied, see `joined_window_attention`.
        span: tokens in a window.
        table: (P, span), the last column for distance 1; its gradient is summed in float32.
        key_mask: (B, N) True where a key may be seen.
        dropout: share of the attention probabilities dropped.

    Returns:
        (B, H, L, P); zeros for a query that sees nothing.
    """
    width = stored_width(q.shape[-1])
    kv_2BHNP = torch.stack([F.pad(t, (0, width - t.shape[-1])) for t in (k, v)])
    out_BHLP = joined_window_attention(
        q, kv_2BHNP, span=span, table=table, key_mask=key_mask, dropout=dropout
    )
    return out_BHLP[..., : q.shape[-1]]


def joined_window_attention(
    q: Tensor,
    kv: Tensor,
    *,
    span: int,
    table: Tensor,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`fused_window_attention` for keys and values in one tensor, whose gradient is one as well.

    kv: (2, B, H, N, `stored_width(P)`), keys first, the last features zero. Read as it lies if that
    is in one piece, in any order of its dimensions but the last: without a copy, as one product
    with both weights gives it.

    Returns (B, H, L, `stored_width(P)`), with zeros as well, in the order (B, L, H, P): a product
    with a weight filled up likewise reads it, and gives its gradient, without a copy.
    """
    keep = wishes()  # those that nobody knows are named here, before anything is compiled
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, kv, table))):
        keep = NO_BACKWARD
    features, num_keys = q.shape[-1], kv.shape[-2]
    reach = min(span, num_keys - 1)
    if reach == 0 or q.numel() == 0:
        return q.new_zeros(*q.shape[:3], kv.shape[-1])
    more = fused_width(features) - features
    stored = kv.shape[-1]
    assert stored == stored_width(features), f"heads of {stored} for {features} features"
    # 32 random bits a query, drawn on the device: a captured CUDA graph draws new ones each replay.
    bits_BHL = torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device)
    if dropout > 0:
        bits_BHL = torch.randint_like(bits_BHL, -(2**31), 2**31)
    out_BHLP: Tensor = _window_attention(
        q,
        F.pad(q.detach(), (0, more)).contiguous(),
        kv if _in_one_piece(kv) else kv.contiguous(),
        F.pad(table[:, span - reach :], (0, 0, 0, more)),
        None if key_mask is None else key_mask.contiguous(),
        bits_BHL,
        1 / math.sqrt(features),
        dropout,
        keep,
    )[0]
    return out_BHLP


def _in_one_piece(t: Tensor) -> bool:
    """Whether features lie side by side, and all of it without overlap and without gaps."""
    places = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.stride(-1) == 1 and 0 not in t.stride() and places == t.numel()


def _aligned(t: Tensor) -> Tensor:
    """The copy engine reads from multiples of 16 bytes on; nearly every tensor begins at one."""
    return t if t.data_ptr() % 16 == 0 else t.clone()


@torch.library.custom_op("acmoe::window_attention", mutates_args=())
def _window_attention(
    given: Tensor,
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    scale: float,
    dropout: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, as wide as kv; log2 of each query's sum; what hopper/saved_weights.py describes.

    given   (B, H, L, P) queries, which take the gradient
    q       the same, filled up with zeros, which is read
    keep    `wishes` of the environment, or NO_BACKWARD. An argument, so that a compiled graph in a
            cache on disk is not taken for other wishes
    """
    features = kv.shape[-1]
    obstacle = hopper_obstacle(q, kv, table.shape[1], dropout)
    kept = _room(q, kv, table.shape[1], dropout, keep)
    if obstacle is None:
        say_once("attention's forward runs on gluon")
        from acmoe.ops.attention.hopper import forward as attention_hopper
        from acmoe.ops.attention.hopper.saved_weights import Kept

        k, v = _aligned(kv).unbind()
        found = attention_hopper.run_forward(
            q, k, v, table, key_mask, bits, scale, dropout, features, Kept(*kept)
        )
    else:
        say_once(f"attention's forward runs on triton; gluon: {obstacle}")
        from acmoe.ops.attention.triton import forward as attention

        k, v = kv.unbind()
        found = attention.run_forward(q, k, v, table, key_mask, bits, scale, dropout, features)
    return (*found, *kept)


def _room(q: Tensor, kv: Tensor, span: int, dropout: float, keep: str) -> tuple[Tensor, Tensor]:
    """Memory for weights and their bases: empty if they are not kept."""
    from acmoe.ops.attention.hopper.saved_weights import kept_sizes

    nothing = q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    if keep == NO_BACKWARD:
        return nothing
    obstacle = keeping_obstacle(q, kv, span, dropout, wanted=keep.partition("/")[0])
    if obstacle is not None:
        say_once(f"attention computes its weights again in the backward: {obstacle}")
        return nothing
    weights, bases = kept_sizes(q.shape, kv.shape[-2], span)
    size = f"{weights * q.element_size() / 2**20:,.0f} MiB a call"
    say_once(
        f"attention keeps its weights for the backward, {size}; ACMOE_KEEP_ATTENTION=never: not"
    )
    return q.new_empty(weights), q.new_empty(bases, dtype=torch.float32)


@_window_attention.register_fake
def _(given, q, kv, table, key_mask, bits, scale, dropout, keep):  # type: ignore[no-untyped-def]
    from acmoe.ops.attention.triton.output import empty_output

    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    kept = _room(q, kv, table.shape[1], dropout, keep)
    return empty_output(q, kv.shape[-1]), lse, *kept


@torch.library.custom_op("acmoe::window_attention_backward", mutates_args=())
def _window_attention_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    out: Tensor,
    lse: Tensor,
    weights: Tensor,
    base: Tensor,
    scale: float,
    dropout: float,
    features: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the `features` of queries that are given, of keys and values, and of the table."""
    # As `empty_output` has them; a hook may have laid them elsewhere.
    grad, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (grad, out))
    dkv = torch.empty_like(kv)
    if weights.numel() > 0:
        from acmoe.ops.attention.hopper import saved_weights as attention_kept

        kept = attention_kept.Kept(weights, base)
        dq, dtable = attention_kept.run_backward(
            _aligned(grad), _aligned(q), _aligned(kv), table, out, lse, kept, dkv, scale, dropout,
            features,
        )  # fmt: skip
    else:
        from acmoe.ops.attention.triton.backward import run_backward

        (k, v), (dk, dv) = kv.unbind(), dkv.unbind()
        dq, dtable = run_backward(
            grad, q, k, v, table, key_mask, bits, out, lse, dk, dv, scale, dropout, features
        )
    return dq, dkv, dtable


@_window_attention_backward.register_fake
def _(grad, q, kv, table, *rest):  # type: ignore[no-untyped-def]
    from acmoe.ops.attention.triton.output import empty_output

    return empty_output(q, rest[-1]), torch.empty_like(kv), torch.empty_like(table)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    given, *tensors, ctx.scale, ctx.dropout, _ = inputs
    ctx.features = given.shape[-1]
    ctx.set_materialize_grads(False)  # nor zeros for the gradients of weights nobody differentiates
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 9
    numbers = (ctx.scale, ctx.dropout, ctx.features)
    dq, *others = _window_attention_backward(grad, *ctx.saved_tensors, *numbers)
    return (dq, None, *others, None, None, None, None, None)


_window_attention.register_autograd(_backward, setup_context=_save)
