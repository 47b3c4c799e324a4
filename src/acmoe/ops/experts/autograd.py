"""The experts of a layer (`expert_mlp`) by Triton and Hopper kernels, with their gradient.

The kernels fuse the gather, the activation, the gate and the combine into the GEMMs; reference.py
defines the result. `torch.compile(fullgraph=True)` and torch's `FlopCounterMode` see one custom op.
Other calls use an autograd.Function instead, because autograd would copy the outputs of a custom op
into .grad (0.4 ms of 19 at olmoe, a shape of lab/bench/shapes.py).

Only h, the hidden units before the activation, is saved for backward, and only if a backward can
follow. Eager backward overwrites h with its gradient, so a second backward through a retained graph
raises. Compiled backward allocates a buffer for the gradient: a compiled graph may not overwrite
its inputs and would copy h first.

T tokens, K experts per token, N = T * K rows sorted by expert, D features, F hidden units, W = F
(or 2F for swiglu), E experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acmoe.ops.dispatch import eager
from acmoe.ops.experts.repeated import repeated, repeated_gradients
from acmoe.ops.experts.triton.sizes import Operands
from acmoe.ops.flops import tell_counters
from acmoe.ops.once import apply, differentiable_once


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the results of `_expert_mlp` for the same arguments."""
    from acmoe.ops.experts.triton.launched import launched_forward

    *tensors, act, dropout, keep, _given_up, _given_down = arguments
    return launched_forward(Operands(*tensors), act, dropout, keep=keep)


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `_expert_mlp_backward`, where dh, the buffer for h's gradient, is given
    after h."""
    from acmoe.ops.experts.triton.launched import launched_gradients

    grad, *tensors, h, dh, act, dropout, dtype, needs_up, needs_down = arguments
    options = (act, dropout, dtype, needs_up, needs_down)
    return launched_gradients(grad, Operands(*tensors), h, dh, *options)


class _Eager(torch.autograd.Function):
    """The experts outside `torch.compile`. `rest` are the arguments of `_forward` without gradient,
    and whether launches are repeated: autograd takes a microsecond or two of the host for each
    argument that it sees."""

    @staticmethod
    def forward(ctx, x, up_bias, down_bias, gate, given_up, given_down, rest):  # type: ignore[no-untyped-def]
        up, down, *rows, ctx.act, ctx.dropout, keep, repeats = rest
        tensors = (x, up, down, up_bias, down_bias, gate, *rows)
        arguments = (*tensors, ctx.act, ctx.dropout, keep, given_up, given_down)
        found = repeated(_forward, *arguments) if repeats else _forward(*arguments)
        ctx.dtype = given_up.dtype
        ctx.save_for_backward(*tensors, *found[1:])
        return found[0]

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *tensors, h = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:6]
        arguments = (grad.contiguous(), *tensors, h, h, ctx.act, ctx.dropout, ctx.dtype, *needs)
        if eager(grad, *tensors):
            found = repeated_gradients(_gradients, *arguments)
        else:
            found = _gradients(*arguments)
        torch.autograd.graph.increment_version(h)
        given = _aligned(found, tensors, needs)
        return given[0], *given[3:6], *given[-2:], None


def _aligned(
    found: tuple[Tensor, ...], tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return a gradient, or None, for each argument of `_forward`; needs: those of up and down."""
    dx, d_up, d_down, d_up_bias, d_down_bias, d_gate = found
    up_bias, down_bias = tensors[3], tensors[4]
    return (
        *(dx, None, None),
        None if up_bias is None else d_up_bias,
        None if down_bias is None else d_down_bias,
        *(d_gate, None, None, None, None, None, None, None, None),
        d_up if needs[0] else None,
        d_down if needs[1] else None,
    )


@torch.library.custom_op("acmoe::expert_mlp", mutates_args=())
def _expert_mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: Tensor,
    permutation: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    expert: Tensor,
    seed: Tensor,
    act: str,
    dropout: float,
    keep: bool,
    given_up: Tensor,
    given_down: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (T, D), and h (N, W) for backward if `keep`, else h without rows.

    up and down are in the dtype of x. given_up and given_down are the parameters they were cast
    from; their values are not read, but autograd sends the weight gradients to them, in the dtype
    of given_up.
    """
    return _forward(
        *(x, up, down, up_bias, down_bias, gate, permutation, inverse, offsets, expert, seed),
        *(act, dropout, keep, given_up, given_down),
    )


@_expert_mlp.register_fake
def _(x, up, down, up_bias, down_bias, gate, permutation, *rest):  # type: ignore[no-untyped-def]
    keep = rest[-3]
    return torch.empty_like(x), x.new_empty(permutation.numel() if keep else 0, up.shape[1])


@torch.library.custom_op("acmoe::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    grad: Tensor,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: Tensor,
    permutation: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    expert: Tensor,
    seed: Tensor,
    h: Tensor,
    act: str,
    dropout: float,
    dtype: torch.dtype,
    needs_up: bool,
    needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(
        *(grad, x, up, down, up_bias, down_bias, gate, permutation, inverse, offsets, expert),
        *(seed, h, torch.empty_like(h), act, dropout, dtype, needs_up, needs_down),
    )


@_expert_mlp_backward.register_fake
def _(grad, x, up, down, up_bias, down_bias, gate, *rest):  # type: ignore[no-untyped-def]
    *_, dtype, needs_up, needs_down = rest
    return (
        torch.empty_like(x),
        torch.empty_like(up, dtype=dtype) if needs_up else up.new_empty(0, dtype=dtype),
        torch.empty_like(down, dtype=dtype) if needs_down else up.new_empty(0, dtype=dtype),
        up.new_empty(up.shape[0], 0) if up_bias is None else torch.empty_like(up_bias),
        up.new_empty(up.shape[0], 0) if down_bias is None else torch.empty_like(down_bias),
        torch.empty_like(gate),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.act, ctx.dropout, _, given, _ = inputs
    ctx.dtype = given.dtype
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    *tensors, h = ctx.saved_tensors
    needs = ctx.needs_input_grad[-2:]
    options = (ctx.act, ctx.dropout, ctx.dtype, *needs)
    return _aligned(_expert_mlp_backward(grad.contiguous(), *tensors, h, *options), tensors, needs)


_expert_mlp.register_autograd(_backward, setup_context=_save)


def _cast(dtype: torch.dtype, up: Tensor, down: Tensor, seen: bool) -> tuple[Tensor, Tensor]:
    """Return the weights as the GEMMs read them, without a gradient.

    Calls of `_Eager` take weights of the right dtype as they are. seen: `_expert_mlp` is called, of
    which only `given_up` and `given_down` have a gradient.
    """
    if up.dtype == down.dtype == dtype and not seen:
        return up, down
    return up.detach().to(dtype), down.detach().to(dtype)


def fused_expert_mlp(
    x_TD: Tensor,
    up_EWD: Tensor,
    down_EDF: Tensor,
    up_bias_EW: Tensor | None,
    down_bias_ED: Tensor | None,
    gate_TK: Tensor,
    permutation_N: Tensor,
    inverse_N: Tensor,
    offsets_E: Tensor,
    expert_N: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
) -> Tensor:
    """Return (T, D): the sum of each token's expert outputs, weighted by its gate.

    GEMMs run in the dtype of the tokens. The gradients of up and down have the dtype of up and are
    not rounded to the tokens' dtype first.
    """
    # Drawn on the device, so that a captured CUDA graph draws new dropout in every replay.
    seed = offsets_E  # a placeholder, not read
    if dropout > 0:
        seed = torch.randint(2**31, (1,), device=x_TD.device)
    given = (x_TD, up_EWD, down_EDF, up_bias_EW, down_bias_ED, gate_TK)
    keep = torch.is_grad_enabled() and any(
        [tensor is not None and tensor.requires_grad for tensor in given]
    )
    repeats = eager(*given)
    seen = not repeats and (is_compiling() or tell_counters())
    tensors = (x_TD, *_cast(x_TD.dtype, up_EWD, down_EDF, seen), *given[3:])
    x, up, down, up_bias, down_bias, gate = [
        None if tensor is None else tensor.contiguous() for tensor in tensors
    ]
    rows = (permutation_N, inverse_N, offsets_E, expert_N, seed, activation, dropout, keep)
    everything = (x, up, down, up_bias, down_bias, gate, *rows, up_EWD, down_EDF)
    out: Tensor
    if repeats and not keep:
        out = repeated(_forward, *everything)[0]
    elif seen:
        out, _ = _expert_mlp(*everything)
    else:
        learned = (x, up_bias, down_bias, gate, up_EWD, down_EDF)
        out = apply(_Eager, *learned, (up, down, *rows, repeats))
    return out
