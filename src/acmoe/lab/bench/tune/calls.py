"""Call each GEMM of an expert layer separately, as ops/experts/autograd.py launches it.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token, N rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.lab.bench.shapes import Shape
from acmoe.lab.bench.tune.candidates import PIPELINE_PREFIX, copies
from acmoe.lab.bench.weights import Weights, draw_tokens, draw_weights
from acmoe.ops.sort import Rows, sort_rows

Call = Callable[[], tuple[Tensor | None, ...]]


def kernel_calls(shape: Shape, device: torch.device, seed: int) -> dict[str, Call]:
    """Return a function for each kernel that launches it on random tokens.

    The calls of pipelines include the work that a pipeline may save: the backward of the activation
    after "hidden", and the copy of x before "up_weight".
    """
    from acmoe.ops.experts.hopper import choice as hopper
    from acmoe.ops.experts.triton import launch as experts
    from acmoe.ops.experts.triton.sizes import Sums, sizes_of
    from acmoe.ops.experts.triton.tiles import Plan
    from acmoe.ops.experts.triton.tokens import row_operand

    generator = torch.Generator(device).manual_seed(seed)
    weights = draw_weights(shape, generator=generator)
    x_TD, grad_TD = (draw_tokens(shape, generator=generator) for _ in range(2))
    rows, gate_TK = _random_rows(shape, generator)
    size = sizes_of(x_TD, weights.down, gate_TK, shape.activation)
    plan = Plan(rows.permutation, rows.offsets, shape.top_k)
    none = torch.zeros(1, dtype=torch.int64, device=device)  # a seed that is not used: dropout is 0
    up, down, up_bias, down_bias = _detached(weights)
    a_NF, h_NW, dh_NW = (
        torch.randn(shape.rows, width, generator=generator, device=device, dtype=x_TD.dtype)
        for width in (shape.hidden, shape.width, shape.width)
    )
    x, later, grad = (
        row_operand(tokens_TD, rows.inverse, size, gather=not copies(shape, backward=backward))
        for tokens_TD, backward in ((x_TD, False), (x_TD, True), (grad_TD, True))
    )
    grad_gather = "p" if grad.gather else "none"

    def hidden_and_activation() -> tuple[Tensor | None, ...]:
        dh_out_NW = torch.empty_like(h_NW)
        sums = Sums(*(0 if bias is None else bias.shape[1] for bias in (up_bias, down_bias)))
        by_bias = None if down_bias is None else grad_TD @ down_bias.T
        ga_NF, shares = hopper.run_hidden(
            *(grad, down, h_NW, dh_out_NW, gate_TK, grad_TD, plan, size, sums, 0.0, none)
        )
        last = experts.run_reduce_partials(
            shares, by_bias, rows.expert, plan, size, sums, x_TD.dtype
        )
        return ga_NF, dh_out_NW, *last

    def copy_and_up_weight() -> tuple[Tensor]:
        gather = hopper.gathers("up_weight", size, x_TD.dtype, device)
        tokens = row_operand(x_TD, rows.inverse, size, gather=gather)
        dw_EWD = hopper.run_weight(
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
            experts.run_weight("down_weight", grad.values, a_NF, plan, size, gather=grad_gather),
        ),
        "up_weight": lambda: (
            experts.run_weight(
                *("up_weight", dh_NW, later.values, plan, size),
                gather="q" if later.gather else "none",
            ),
        ),
        f"{PIPELINE_PREFIX}hidden": hidden_and_activation,
        f"{PIPELINE_PREFIX}down": lambda: (
            hopper.run_rows("down", a_NF, down, down_bias, plan, size),
        ),
        f"{PIPELINE_PREFIX}input": lambda: (
            hopper.run_rows("input", dh_NW, up, None, plan, size, across=True),
        ),
        f"{PIPELINE_PREFIX}down_weight": lambda: (
            hopper.run_weight(
                *("down_weight", grad.values, a_NF, plan, size),
                gather=grad_gather,
                dtype=x_TD.dtype,
            ),
        ),
        f"{PIPELINE_PREFIX}up_weight": copy_and_up_weight,
    }


def _random_rows(shape: Shape, generator: torch.Generator) -> tuple[Rows, Tensor]:
    size, device = (shape.tokens, shape.num_experts), generator.device
    score_TE = torch.rand(size, generator=generator, device=device)
    gate_TK, expert_ids_TK = score_TE.topk(shape.top_k)
    return sort_rows(expert_ids_TK, shape.num_experts), gate_TK


def _detached(weights: Weights) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return (
        weights.up.detach(),
        weights.down.detach(),
        None if weights.up_bias is None else weights.up_bias.detach(),
        None if weights.down_bias is None else weights.down_bias.detach(),
    )
