"""Launches of the fused experts: the forward, and the gradients of everything it reads.

T tokens, K experts per token, N = T * K rows sorted by expert, D features, F hidden units, W = F
(or 2F for swiglu), E experts.
"""

from functools import partial

import torch
from torch import Tensor

from acmoe.ops.device import rules
from acmoe.ops.device.launcher import compute
from acmoe.ops.experts.hopper.choice import gathers, run_hidden, run_rows, run_weight
from acmoe.ops.experts.hopper.up_choice import run_up
from acmoe.ops.experts.triton.launch import run_reduce_partials
from acmoe.ops.experts.triton.sizes import Sums, sizes_of
from acmoe.ops.experts.triton.tiles import Plan
from acmoe.ops.experts.triton.tokens import row_operand, run_combine
from acmoe.ops.experts.triton.vectors import run_vectors


def launched_forward(
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


def launched_gradients(
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
    size = sizes_of(x, down, gate, act)
    plan = Plan(permutation, offsets, size.top_k)
    upstream = row_operand(grad, inverse, size, gather=gathers("hidden", size, x.dtype, x.device))
    by_bias = None if down_bias is None else compute(_times_bias, grad, down_bias)
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
    if gate.dtype != dgate.dtype:
        dgate = compute(partial(Tensor.to, dtype=gate.dtype), dgate)
    return dx, d_up, d_down, d_up_bias, d_down_bias, dgate


def _times_bias(grad: Tensor, down_bias: Tensor) -> Tensor:
    return grad @ down_bias.T
