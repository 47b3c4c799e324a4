"""Call each GEMM of an expert layer separately, on random tokens.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token, N rows.
"""

from functools import partial

import torch
from torch import Tensor

from acmoe.lab.bench.implementations.weights import draw_tokens, draw_weights
from acmoe.lab.bench.shapes import Shape
from acmoe.lab.bench.tune.candidates import PIPELINE_PREFIX, trying
from acmoe.ops.experts.tune.calls import Call, backward_calls, forward_calls
from acmoe.ops.experts.tune.inputs import Inputs
from acmoe.ops.sort import Rows, sort_rows


def kernel_calls(shape: Shape, device: torch.device, seed: int) -> dict[str, Call]:
    """Return a function for each kernel that launches it on random tokens.

    A GEMM without a prefix runs on Triton, with one as the settings of its pipeline say. Both
    include the work that a pipeline may save (`backward_calls`).
    """
    generator = torch.Generator(device).manual_seed(seed)
    given = draw_inputs(shape, generator)
    calls = forward_calls(given, generator) | backward_calls(given, generator)
    found: dict[str, Call] = {}
    for kernel, call in calls.items():
        found[kernel] = partial(_by_triton, kernel, call)
        if kernel != "up":  # "up" has no pipeline
            found[PIPELINE_PREFIX + kernel] = call
    return found


def draw_inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    """Return random tokens, weights and choices of a layer of this shape."""
    weights = draw_weights(shape, generator=generator)
    x_TD = draw_tokens(shape, generator=generator)
    rows, gate_TK = _random_rows(shape, generator)
    up, down, up_bias, down_bias = (
        None if one is None else one.detach()
        for one in (weights.up, weights.down, weights.up_bias, weights.down_bias)
    )
    assert up is not None and down is not None
    return Inputs(
        *(x_TD, up, down, up_bias, down_bias, gate_TK, rows, shape.activation), result=x_TD.dtype
    )


def _by_triton(kernel: str, call: Call) -> tuple[Tensor, ...]:
    if kernel == "up":
        return call()
    with trying(PIPELINE_PREFIX + kernel, None):
        return call()


def _random_rows(shape: Shape, generator: torch.Generator) -> tuple[Rows, Tensor]:
    size, device = (shape.tokens, shape.num_experts), generator.device
    score_TE = torch.rand(size, generator=generator, device=device)
    gate_TK, expert_ids_TK = score_TE.topk(shape.top_k)
    return sort_rows(expert_ids_TK, shape.num_experts), gate_TK
