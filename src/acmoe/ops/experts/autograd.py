"""The experts of a layer (`expert_mlp`) by Triton and Hopper kernels, with their gradient.

The kernels fuse the gather, the activation, the gate and the combine into the GEMMs; reference.py
defines the result. `torch.compile(fullgraph=True)` sees one custom op. Eager calls use an
autograd.Function instead, because autograd would copy the outputs of a custom op into .grad (0.4 ms
of 19 at olmoe, a shape of lab/bench/shapes.py).

Only h, the hidden units before the activation, is saved for backward, and only if a backward can
follow. Eager backward overwrites h with its gradient, so a second backward through a retained graph
raises. Compiled backward allocates a buffer for the gradient: a compiled graph may not overwrite
its inputs and would copy h first.

T tokens, K experts per token, N = T * K rows sorted by expert, D features, F hidden units, W = F
(or 2F for swiglu), E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager
from acmoe.ops.experts.repeated import repeated
from acmoe.ops.once import differentiable_once


def _forward(
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
    from acmoe.ops.device import rules
    from acmoe.ops.experts.hopper.choice import gathers, run_rows
    from acmoe.ops.experts.triton.launch import run_up
    from acmoe.ops.experts.triton.sizes import sizes_of
    from acmoe.ops.experts.triton.tiles import Plan
    from acmoe.ops.experts.triton.tokens import row_operand, run_combine
    from acmoe.ops.experts.triton.vectors import run_vectors

    size = sizes_of(x, down, gate, act)
    if not keep and dropout == 0 and rules.by_vectors(size.tokens, size.top_k, size.experts):
        biases = up_bias, down_bias
        out = run_vectors(x, up, down, *biases, gate, permutation, inverse, expert, size)
        return out, x.new_empty(0, size.width)
    plan = Plan(permutation, offsets, size.top_k)
    tokens = row_operand(x, inverse, size, gather=gathers("up", size, x.dtype, x.device))
    h, a = run_up(tokens, up, up_bias, plan, size, dropout, seed, keep=keep)
    del tokens  # may be a sorted copy of x: free it
    y = run_rows("down", a, down, down_bias, plan, size)
    return run_combine(y, gate, inverse, offsets, size.tokens), h


def _gradients(
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
    dh: Tensor,
    act: str,
    dropout: float,
    dtype: torch.dtype,
    needs_up: bool,
    needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, up, down, up_bias, down_bias and gate.

    A bias that is None has a gradient of 0 columns. dh is the buffer for the gradient of h; it may
    be h itself. dtype is that of the gradients of up and down, which are empty if not needed.
    """
    from acmoe.ops.experts.hopper.choice import gathers, run_hidden, run_rows, run_weight
    from acmoe.ops.experts.triton.launch import run_reduce_partials
    from acmoe.ops.experts.triton.sizes import Sums, sizes_of
    from acmoe.ops.experts.triton.tiles import Plan
    from acmoe.ops.experts.triton.tokens import row_operand, run_combine

    size = sizes_of(x, down, gate, act)
    plan = Plan(permutation, offsets, size.top_k)
    upstream = row_operand(grad, inverse, size, gather=gathers("hidden", size, x.dtype, x.device))
    by_bias = None if down_bias is None else grad @ down_bias.T
    sums = Sums(
        0 if up_bias is None else up_bias.shape[1], 0 if down_bias is None else down_bias.shape[1]
    )
    a, shares = run_hidden(*(upstream, down, h, dh, gate, grad, plan, size, sums, dropout, seed))
    dgate, d_up_bias, d_down_bias = run_reduce_partials(
        shares, by_bias, expert, plan, size, sums, x.dtype
    )
    d_up, d_down = (x.new_empty(0, dtype=dtype) for _ in range(2))
    if needs_down:
        gather = "p" if upstream.gather else "none"
        d_down = run_weight(
            "down_weight", upstream.values, a, plan, size, gather=gather, dtype=dtype
        )
    del a, upstream  # free them before the next large allocation
    if needs_up:
        gathered = gathers("up_weight", size, x.dtype, x.device, result=dtype)
        tokens = row_operand(x, inverse, size, gather=gathered)
        gather = "q" if tokens.gather else "none"
        d_up = run_weight("up_weight", dh, tokens.values, plan, size, gather=gather, dtype=dtype)
        del tokens
    dx_rows = run_rows("input", dh, up, None, plan, size, across=True)
    dx = run_combine(dx_rows, None, inverse, offsets, size.tokens)
    return dx, d_up, d_down, d_up_bias, d_down_bias, dgate.to(gate.dtype)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        *tensors, ctx.act, ctx.dropout, _, given, _ = inputs
        out, h = repeated(_forward, *inputs) if eager(*tensors[:6]) else _forward(*inputs)
        ctx.dtype = given.dtype
        ctx.save_for_backward(*tensors, h)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *tensors, h = ctx.saved_tensors
        needs = ctx.needs_input_grad[-2:]
        arguments = (grad.contiguous(), *tensors, h, h, ctx.act, ctx.dropout, ctx.dtype, *needs)
        found = _gradients(*arguments)
        torch.autograd.graph.increment_version(h)
        return _aligned(found, tensors, needs)


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
    weights = [weight.detach().to(x_TD.dtype) for weight in (up_EWD, down_EDF)]
    tensors = (x_TD, *weights, up_bias_EW, down_bias_ED, gate_TK)
    keep = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*tensors, up_EWD, down_EDF)
    )
    arguments = (
        *(None if tensor is None else tensor.contiguous() for tensor in tensors),
        *(permutation_N, inverse_N, offsets_E, expert_N, seed),
        *(activation, dropout, keep, up_EWD, down_EDF),
    )
    out: Tensor
    given = (x_TD, up_EWD, down_EDF, up_bias_EW, down_bias_ED, gate_TK)
    if not keep and eager(*given):
        out = repeated(_forward, *arguments)[0]
    elif torch.compiler.is_compiling():
        out, _ = _expert_mlp(*arguments)
    else:
        out = _Eager.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
