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

import torch
from torch import Tensor
from torch.compiler import is_compiling

from acmoe.ops.dispatch import eager
from acmoe.ops.experts.reference import ExpertWeights
from acmoe.ops.experts.repeated import (
    launch_forward,
    launch_gradients,
    repeated,
    repeated_gradients,
)
from acmoe.ops.experts.triton.sizes import GradientOptions, Operands
from acmoe.ops.flops import tell_counters
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.once import apply, as_saved, differentiable_once
from acmoe.ops.sort.reference import Rows


class _Eager(torch.autograd.Function):
    """The experts outside `torch.compile`.

    `rest` holds the operands and options without gradient, and a flag that is True if launches are
    repeated. It is one argument, because autograd takes a microsecond or two of the host for each.
    """

    @staticmethod
    def forward(ctx, x, up_bias, down_bias, gate, given_up, given_down, rest):  # type: ignore[no-untyped-def]
        up, down, *rows, ctx.act, ctx.dropout, keep, repeats = rest
        operands = Operands(x, up, down, up_bias, down_bias, gate, *rows)
        run = repeated if repeats else launch_forward
        out, *h = run(operands, ctx.act, ctx.dropout, keep)
        ctx.dtype = given_up.dtype
        ctx.save_for_backward(*operands, *h)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *tensors, h = as_saved(ctx.saved_tensors)
        operands = Operands(*tensors)
        options = GradientOptions(ctx.act, ctx.dropout, ctx.dtype, *ctx.needs_input_grad[4:6])
        if eager(grad, *operands):
            found = repeated_gradients(grad.contiguous(), operands, h, options)
        else:
            found = launch_gradients(grad.contiguous(), operands, h, h, options)
        torch.autograd.graph.increment_version(h)
        dx, d_up, d_down, d_up_bias, d_down_bias, d_gate = _wanted(found, operands, options)
        return dx, d_up_bias, d_down_bias, d_gate, d_up, d_down, None


def _wanted(
    found: tuple[Tensor, ...], operands: Operands, options: GradientOptions
) -> tuple[Tensor | None, ...]:
    """Return the six gradients, None for a bias that is None and a weight that needs none."""
    dx, d_up, d_down, d_up_bias, d_down_bias, d_gate = found
    return (
        dx,
        d_up if options.needs_up else None,
        d_down if options.needs_down else None,
        None if operands.up_bias is None else d_up_bias,
        None if operands.down_bias is None else d_down_bias,
        d_gate,
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

    up and down are in the dtype of x: casts of the parameters given_up and given_down. The values
    of the parameters are not read, but autograd sends them the weight gradients, in the dtype of
    given_up.
    """
    operands = Operands(
        *(x, up, down, up_bias, down_bias, gate, permutation, inverse, offsets, expert, seed)
    )
    return launch_forward(operands, act, dropout, keep)


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
    operands = Operands(
        *(x, up, down, up_bias, down_bias, gate, permutation, inverse, offsets, expert, seed)
    )
    options = GradientOptions(act, dropout, dtype, needs_up, needs_down)
    return launch_gradients(grad, operands, h, torch.empty_like(h), options)


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
    *tensors, h = as_saved(ctx.saved_tensors)
    options = GradientOptions(ctx.act, ctx.dropout, ctx.dtype, *ctx.needs_input_grad[-2:])
    found = _expert_mlp_backward(grad.contiguous(), *tensors, h, *options)
    dx, d_up, d_down, *biases, d_gate = _wanted(found, Operands(*tensors), options)
    # up and down are casts without a gradient; given_up and given_down, the last inputs, have one.
    unread = (None,) * 8  # the gradients of permutation to keep
    return dx, None, None, *biases, d_gate, *unread, d_up, d_down


_expert_mlp.register_autograd(_backward, setup_context=_save)


def _cast(dtype: torch.dtype, up: Tensor, down: Tensor, seen: bool) -> tuple[Tensor, Tensor]:
    """Return the weights as the GEMMs read them, without a gradient.

    seen: the caller calls `_expert_mlp`, which gives a gradient to `given_up` and `given_down`
    only. `_Eager` takes weights of the right dtype as they are.
    """
    if up.dtype == down.dtype == dtype and not seen:
        return up, down
    return up.detach().to(dtype), down.detach().to(dtype)


def fused_expert_mlp(
    x_TD: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    gate_TK: Tensor,
    *,
    activation: str,
    dropout: float = 0.0,
) -> Tensor:
    """Return (T, D): the sum of each token's expert outputs, weighted by its gate.

    GEMMs run in the dtype of the tokens. The gradients of up and down have the dtype of up and are
    not rounded to the tokens' dtype first.
    """
    # Drawn on the device, so that a captured CUDA graph draws new dropout in every replay.
    seed = rows.offsets  # a placeholder, not read
    if dropout > 0:
        seed = torch.randint(2**31, (1,), device=x_TD.device)
    keep = records_gradient(x_TD, *weights, gate_TK)
    repeats = eager(x_TD, *weights, gate_TK)
    seen = not repeats and (is_compiling() or tell_counters())
    up, down = _cast(x_TD.dtype, weights.up, weights.down, seen)
    operands = Operands(
        x_TD.contiguous(),
        up.contiguous(),
        down.contiguous(),
        None if weights.up_bias is None else weights.up_bias.contiguous(),
        None if weights.down_bias is None else weights.down_bias.contiguous(),
        gate_TK.contiguous(),
        *(rows.permutation, rows.inverse, rows.offsets, rows.expert, seed),
    )
    options = (activation, dropout, keep)
    out: Tensor
    if repeats and not keep:
        out = repeated(operands, *options)[0]
    elif seen:
        out, _ = _expert_mlp(*operands, *options, weights.up, weights.down)
    else:
        x, up, down, up_bias, down_bias, gate, *others = operands
        learned = (x, up_bias, down_bias, gate, weights.up, weights.down)
        out = apply(_Eager, *learned, (up, down, *others, *options, repeats))
    return out
