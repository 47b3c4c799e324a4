"""Register the kernels of the op `window_attention`.

The kernels need a relative-position embedding. The forward has a Gluon kernel for Hopper and a
Triton kernel for all other GPUs. The op is a custom op, so that `torch.compile(fullgraph=True)`
sees one call. It saves queries, keys, values, output and one logsumexp per query for backward. The
Hopper kernel also saves the attention probabilities where they fit in memory; otherwise backward
recomputes them.

B streams, H heads, L queries, at the last L of N key positions, W window length, P features of a
head. Keys and values are one tensor, so that one GEMM computes them and one takes their gradient.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.reference import window_attention
from acmoe.ops.attention.support import (
    fused_width,
    hopper_unsupported,
    kernel_unsupported,
    requested_options,
    saving_unsupported,
    stored_width,
)
from acmoe.ops.dispatch import log_once
from acmoe.ops.flops import tell_counters
from acmoe.ops.grad_mode import records_gradient

NO_BACKWARD = "nothing"  # value of `saving` if no backward will follow: save nothing


def unsupported(q: Tensor, positions: Tensor | None, dropout: float) -> str | None:
    """Return the reason why the kernels cannot serve this call, or None."""
    return kernel_unsupported(q, positions, dropout)


@window_attention.register("triton", unsupported=unsupported)
def fused_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    span: int,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Copy keys and values into one tensor; `joined_window_attention` avoids the copy."""
    assert positions is not None
    width = stored_width(q.shape[-1])
    kv_2BHNP = torch.stack([F.pad(t, (0, width - t.shape[-1])) for t in (k, v)])
    out_BHLP = joined_window_attention(
        q, kv_2BHNP, span=span, positions=positions, key_mask=key_mask, dropout=dropout
    )
    return out_BHLP[..., : q.shape[-1]]


def joined_window_attention(
    q: Tensor,
    kv: Tensor,
    *,
    span: int,
    positions: Tensor,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `window_attention` for keys and values in one tensor; their gradient is one tensor.

    kv is (2, B, H, N, `stored_width(P)`), keys first, padded with zero features. No copy is made if
    its memory is dense and its last dimension contiguous; the other dimensions may be in any order,
    for example as one GEMM with the joined weights of keys and values writes them.

    Returns (B, H, L, `stored_width(P)`), padded likewise, stored in the order (B, L, H, P): an
    output projection with a padded weight reads it, and writes its gradient, without a copy.
    """
    saving = requested_options()  # an unknown option raises here, before anything is compiled
    if not records_gradient(q, kv, positions):
        saving = NO_BACKWARD
    features, num_keys = q.shape[-1], kv.shape[-2]
    reach = min(span, num_keys - 1)
    if reach == 0 or q.numel() == 0:
        return q.new_zeros(*q.shape[:3], kv.shape[-1])
    more = fused_width(features) - features
    stored = kv.shape[-1]
    assert stored == stored_width(features), f"heads of {stored} for {features} features"
    # 32 random bits per query seed dropout. They are drawn on the device, so that every replay of a
    # captured CUDA graph draws new ones.
    bits_BHL = torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device)
    if dropout > 0:
        bits_BHL = torch.randint_like(bits_BHL, -(2**31), 2**31)
    tell_counters()
    out_BHLP: Tensor = _window_attention(
        q,
        F.pad(q.detach(), (0, more)).contiguous(),
        kv if _is_dense(kv) else kv.contiguous(),
        F.pad(positions[:, span - reach :], (0, 0, 0, more)),
        None if key_mask is None else key_mask.contiguous(),
        bits_BHL,
        1 / math.sqrt(features),
        dropout,
        saving,
    )[0]
    return out_BHLP


def _is_dense(t: Tensor) -> bool:
    """Return True if the memory is dense and the last dimension contiguous."""
    extent = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.stride(-1) == 1 and 0 not in t.stride() and extent == t.numel()


@torch.library.custom_op("acmoe::window_attention", mutates_args=())
def _window_attention(
    given: Tensor,
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    scale: float,
    dropout: float,
    saving: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, as wide as kv, the base-2 logsumexp of each query, and the saved
    probabilities and their row maxima (hopper/saved_weights.py).

    given   (B, H, L, P) queries; autograd sends the gradient to them, their values are not read
    q       the queries, padded with zeros
    saving  `requested_options()`, or NO_BACKWARD. It is an argument, so that a compiled graph from
            the disk cache is not reused under other options
    """
    features = kv.shape[-1]
    reason = hopper_unsupported(q, kv, positions.shape[1], dropout)
    saved = _saved_buffers(q, kv, positions.shape[1], dropout, saving)
    if reason is None:
        log_once("window_attention's forward runs on gluon")
        from acmoe.ops.attention.hopper import forward as attention_hopper
        from acmoe.ops.attention.hopper.saved_weights import SavedWeights
        from acmoe.ops.device.launcher import tma_aligned

        k, v = tma_aligned(kv).unbind()
        inputs = Inputs(q, k, v, positions, key_mask, bits, scale, dropout, features)
        found = attention_hopper.run_forward(inputs, SavedWeights(*saved))
    else:
        log_once(f"window_attention's forward runs on triton; gluon: {reason}")
        from acmoe.ops.attention.triton import forward as attention

        k, v = kv.unbind()
        inputs = Inputs(q, k, v, positions, key_mask, bits, scale, dropout, features)
        found = attention.run_forward(inputs)
    return (*found, *saved)


def _saved_buffers(
    q: Tensor, kv: Tensor, span: int, dropout: float, saving: str
) -> tuple[Tensor, Tensor]:
    """Return buffers for the saved probabilities and row maxima; empty if they are not saved."""
    from acmoe.ops.attention.hopper.saved_weights import saved_sizes

    nothing = q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    if saving == NO_BACKWARD:
        return nothing
    reason = saving_unsupported(q, kv, span, dropout, wanted=saving.partition("/")[0])
    if reason is not None:
        log_once(f"attention recomputes its probabilities in the backward: {reason}")
        return nothing
    weights, maxima = saved_sizes(q.shape, kv.shape[-2], span)
    size = f"{weights * q.element_size() / 2**20:,.0f} MiB a call"
    log_once(
        f"attention saves its probabilities for the backward, {size}; ACMOE_KEEP_ATTENTION=never "
        "recomputes them"
    )
    return q.new_empty(weights), q.new_empty(maxima, dtype=torch.float32)


@_window_attention.register_fake
def _(given, q, kv, positions, key_mask, bits, scale, dropout, saving):  # type: ignore[no-untyped-def]
    from acmoe.ops.attention.triton.output import empty_output

    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    saved = _saved_buffers(q, kv, positions.shape[1], dropout, saving)
    return empty_output(q, kv.shape[-1]), lse, *saved


@torch.library.custom_op("acmoe::window_attention_backward", mutates_args=())
def _window_attention_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    key_mask: Tensor | None,
    bits: Tensor,
    out: Tensor,
    lse: Tensor,
    weights: Tensor,
    row_max: Tensor,
    scale: float,
    dropout: float,
    features: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries (`features` wide), of kv and of the positions."""
    # The kernels expect the memory order of `empty_output`; a hook may have changed it.
    grad, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (grad, out))
    dkv = torch.empty_like(kv)
    dk, dv = dkv.unbind()
    rest = (positions, key_mask, bits, scale, dropout, features)
    if weights.numel() > 0:
        from acmoe.ops.attention.hopper.backward import run_backward as run_hopper_backward
        from acmoe.ops.attention.hopper.saved_weights import SavedWeights
        from acmoe.ops.device.launcher import tma_aligned

        k, v = tma_aligned(kv).unbind()
        given = Inputs(tma_aligned(q), k, v, *rest)
        saved = SavedWeights(weights, row_max)
        dq, dpositions = run_hopper_backward(tma_aligned(grad), given, out, lse, saved, dk, dv)
    else:
        from acmoe.ops.attention.triton.backward import run_backward

        k, v = kv.unbind()
        dq, dpositions = run_backward(grad, Inputs(q, k, v, *rest), out, lse, dk, dv)
    return dq, dkv, dpositions


@_window_attention_backward.register_fake
def _(grad, q, kv, positions, *rest):  # type: ignore[no-untyped-def]
    from acmoe.ops.attention.triton.output import empty_output

    return empty_output(q, rest[-1]), torch.empty_like(kv), torch.empty_like(positions)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    given, *tensors, ctx.scale, ctx.dropout, _ = inputs
    ctx.features = given.shape[-1]
    ctx.set_materialize_grads(False)  # no zero gradients for the saved probabilities
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 9
    numbers = (ctx.scale, ctx.dropout, ctx.features)
    dq, *others = _window_attention_backward(grad, *ctx.saved_tensors, *numbers)
    return (dq, None, *others, None, None, None, None, None)


_window_attention.register_autograd(_backward, setup_context=_save)
