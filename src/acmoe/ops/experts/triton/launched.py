"""Launches of the fused experts: the forward, and the gradients of everything it reads.

T tokens, K experts per token, N = T * K rows sorted by expert, D features, F hidden units, W = F
(or 2F for swiglu), E experts.
"""

from functools import partial

import torch
from torch import Tensor

from acmoe.ops.device.launcher import compute
from acmoe.ops.experts.hopper.choice import row_operand_for, run_hidden, run_rows, run_weight
from acmoe.ops.experts.hopper.up_choice import run_up
from acmoe.ops.experts.settings import rules
from acmoe.ops.experts.triton.backward_launch import run_reduce_partials
from acmoe.ops.experts.triton.sizes import (
    GradientOptions,
    HiddenInputs,
    Operands,
    RowOperand,
    Sizes,
    Sums,
    sizes_of,
)
from acmoe.ops.experts.triton.tiles import Plan
from acmoe.ops.experts.triton.tokens import run_combine
from acmoe.ops.experts.triton.vectors import run_vectors


def launched_forward(
    given: Operands, act: str, dropout: float, *, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs (T, D), and h (N, W) for backward if `keep`, else h without rows."""
    x, inverse, offsets = given.x, given.inverse, given.offsets
    size = sizes_of(x, given.down, given.gate, act)
    if not keep and dropout == 0 and rules.by_vectors(size.tokens, size.top_k, size.experts):
        return run_vectors(given, size), x.new_empty(0, size.width)
    plan = Plan(given.permutation, offsets, size.top_k)
    weights = given.up, given.up_bias
    h, a = run_up(x, inverse, *weights, plan, size, dropout, given.seed, keep=keep)
    y = run_rows("down", a, given.down, given.down_bias, plan, size)
    return run_combine(y, given.gate, inverse, offsets, size.tokens), h


def launched_gradients(
    grad: Tensor, given: Operands, h: Tensor, dh: Tensor, options: GradientOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, up, down, up_bias, down_bias and gate.

    A bias that is None has a gradient of 0 columns. dh is the buffer for the gradient of h; it may
    be h itself. The gradients of up and down are empty if they are not needed.
    """
    x, gate, inverse, dtype = given.x, given.gate, given.inverse, options.dtype
    size = sizes_of(x, given.down, gate, options.act)
    plan = Plan(given.permutation, given.offsets, size.top_k)
    upstream = row_operand_for("hidden", grad, inverse, size)
    a, dgate, d_up_bias, d_down_bias = hidden_gradients(
        grad, upstream, given, h, dh, plan, size, options.dropout
    )
    d_up, d_down = (x.new_empty(0, dtype=dtype) for _ in range(2))
    if options.needs_down:
        d_down = down_weight_gradient(upstream, a, plan, size, dtype)
    del a, upstream  # free them before the next large allocation
    if options.needs_up:
        d_up = up_weight_gradient(dh, x, inverse, plan, size, dtype)
    dx_rows = run_rows("input", dh, given.up, None, plan, size, across=True)
    dx = run_combine(dx_rows, None, inverse, given.offsets, size.tokens)
    if gate.dtype != dgate.dtype:
        dgate = compute(partial(Tensor.to, dtype=gate.dtype), dgate)
    return dx, d_up, d_down, d_up_bias, d_down_bias, dgate


def hidden_gradients(
    grad: Tensor,
    upstream: RowOperand,
    given: Operands,
    h: Tensor,
    dh: Tensor,
    plan: Plan,
    size: Sizes,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write dh (N, W); return gate * a (N, F) and the gradients of gate, up_bias and down_bias.

    upstream holds grad (T, D), the gradient of the outputs, as the GEMM reads it.
    """
    by_bias = None if given.down_bias is None else compute(_times_bias, grad, given.down_bias)
    biases = given.up_bias, given.down_bias
    sums = Sums(*[0 if bias is None else bias.shape[1] for bias in biases])
    hidden = HiddenInputs(h, dh, given.gate, grad, sums, dropout, given.seed)
    a, partials = run_hidden(upstream, given.down, hidden, plan, size)
    dtype = given.x.dtype
    return a, *run_reduce_partials(partials, by_bias, given.expert, plan, size, sums, dtype)


def down_weight_gradient(
    upstream: RowOperand, a: Tensor, plan: Plan, size: Sizes, dtype: torch.dtype
) -> Tensor:
    """Return (E, D, F): the outputs' gradient times gate * a, over each expert's rows."""
    gather = "p" if upstream.gather else "none"
    return run_weight("down_weight", upstream.values, a, plan, size, gather=gather, dtype=dtype)


def up_weight_gradient(
    dh: Tensor, x: Tensor, inverse: Tensor, plan: Plan, size: Sizes, dtype: torch.dtype
) -> Tensor:
    """Return (E, W, D): dh times x, over each expert's rows."""
    tokens = row_operand_for("up_weight", x, inverse, size, dtype)
    gather = "q" if tokens.gather else "none"
    return run_weight("up_weight", dh, tokens.values, plan, size, gather=gather, dtype=dtype)


def _times_bias(grad: Tensor, down_bias: Tensor) -> Tensor:
    return grad @ down_bias.T
