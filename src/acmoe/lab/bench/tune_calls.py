"""The products of a layer of experts, each on its own, as ops/experts/autograd.py launches them.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token, N rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.experts.dispatch import Order, sort_by_expert
from acmoe.lab.bench.shapes import Shape
from acmoe.lab.bench.tune_candidates import RING, copies
from acmoe.lab.bench.weights import Weights, draw_tokens, draw_weights

Call = Callable[[], tuple[Tensor | None, ...]]


def kernel_calls(shape: Shape, device: torch.device, seed: int) -> dict[str, Call]:
    """Each kernel's launch on random tokens.

    By the name of a ring a product comes with all that a ring would save: the activation's backward
    behind the hidden units' gradient, the copy of x for the first weight's.
    """
    from acmoe.ops.experts.hopper import choice as ring_choice
    from acmoe.ops.experts.triton import launch as experts
    from acmoe.ops.experts.triton.sizes import Sums, sizes_of
    from acmoe.ops.experts.triton.tiles import Plan
    from acmoe.ops.experts.triton.tokens import source_of

    generator = torch.Generator(device).manual_seed(seed)
    weights = draw_weights(shape, generator=generator)
    x_TD, grad_TD = (draw_tokens(shape, generator=generator) for _ in range(2))
    order, gate_TK = _random_order(shape, generator)
    size = sizes_of(x_TD, weights.down, gate_TK, shape.activation)
    plan = Plan(order.order, order.end, shape.top_k)
    none = torch.zeros(1, dtype=torch.int64, device=device)  # a seed nobody draws with
    up, down, up_bias, down_bias = _detached(weights)
    a_NF, h_NW, dh_NW = (
        torch.randn(shape.rows, width, generator=generator, device=device, dtype=x_TD.dtype)
        for width in (shape.hidden, shape.width, shape.width)
    )
    x, later, grad = (
        source_of(tokens_TD, order.back, size, gather=not copies(shape, backward=backward))
        for tokens_TD, backward in ((x_TD, False), (x_TD, True), (grad_TD, True))
    )
    of_grad = "p" if grad.gather else "none"

    def hidden_and_behind() -> tuple[Tensor | None, ...]:
        into_NW = torch.empty_like(h_NW)
        sums = Sums(*(0 if bias is None else bias.shape[1] for bias in (up_bias, down_bias)))
        by_bias = None if down_bias is None else grad_TD @ down_bias.T
        ga_NF, shares = ring_choice.run_hidden(
            *(grad, down, h_NW, into_NW, gate_TK, grad_TD, plan, size, sums, 0.0, none)
        )
        last = experts.run_finish(shares, by_bias, order.expert, plan, size, sums, x_TD.dtype)
        return ga_NF, into_NW, *last

    def first_weight_and_before() -> tuple[Tensor]:
        gather = ring_choice.gathers("up_weight", size, x_TD.dtype, device)
        tokens = source_of(x_TD, order.back, size, gather=gather)
        dw_EWD = ring_choice.run_weight(
            *("up_weight", dh_NW, tokens.values, plan, size),
            gather="q" if tokens.gather else "none",
            dtype=x_TD.dtype,
        )
        return (dw_EWD,)

    return {
        "up": lambda: experts.run_up(x, up, up_bias, plan, size, 0.0, none),
        "down": lambda: (experts.run_rows("down", a_NF, down, down_bias, plan, size),),
        "hidden": lambda: (
            experts.run_rows(
                *("hidden", grad.values, down, None, plan, size), across=True, gather=grad.gather
            ),
        ),
        "input": lambda: (experts.run_rows("input", dh_NW, up, None, plan, size, across=True),),
        "down_weight": lambda: (
            experts.run_weight("down_weight", grad.values, a_NF, plan, size, gather=of_grad),
        ),
        "up_weight": lambda: (
            experts.run_weight(
                *("up_weight", dh_NW, later.values, plan, size),
                gather="q" if later.gather else "none",
            ),
        ),
        f"{RING}hidden": hidden_and_behind,
        f"{RING}down": lambda: (ring_choice.run_rows("down", a_NF, down, down_bias, plan, size),),
        f"{RING}input": lambda: (
            ring_choice.run_rows("input", dh_NW, up, None, plan, size, across=True),
        ),
        f"{RING}down_weight": lambda: (
            ring_choice.run_weight(
                *("down_weight", grad.values, a_NF, plan, size), gather=of_grad, dtype=x_TD.dtype
            ),
        ),
        f"{RING}up_weight": first_weight_and_before,
    }


def _random_order(shape: Shape, generator: torch.Generator) -> tuple[Order, Tensor]:
    size, device = (shape.tokens, shape.num_experts), generator.device
    score_TE = torch.rand(size, generator=generator, device=device)
    gate_TK, expert_ids_TK = score_TE.topk(shape.top_k)
    return sort_by_expert(expert_ids_TK, shape.num_experts), gate_TK


def _detached(weights: Weights) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return (
        weights.up.detach(),
        weights.down.detach(),
        None if weights.up_bias is None else weights.up_bias.detach(),
        None if weights.down_bias is None else weights.down_bias.detach(),
    )
