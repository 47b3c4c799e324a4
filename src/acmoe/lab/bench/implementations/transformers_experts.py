"""The experts of transformers on a benchmark's weights, gated or not.

T tokens, D features, K experts per token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from acmoe.lab.bench.implementations.plain import activate
from acmoe.lab.bench.implementations.weights import Weights
from acmoe.lab.bench.shapes import Shape

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (T, D), ids (T, K), gates (T, K) -> (T, D)


def build_experts(shape: Shape, weights: Weights, implementation: str) -> Experts:
    """Return the experts of this implementation of transformers: grouped_mm or eager.

    Gated experts are those of Qwen3-MoE. transformers has models with experts that are not gated,
    but none with a plain relu and biases: those run its functions on a module with its attributes.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.dim,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        hidden_act="silu",
    )
    config._experts_implementation = implementation
    if shape.activation != "swiglu":
        return _ungated(shape, weights, config)
    with torch.device("meta"):
        experts: Experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = weights.up, weights.down  # type: ignore[attr-defined]
    return experts


def _ungated(shape: Shape, weights: Weights, config: object) -> Experts:
    from transformers.integrations.moe import use_experts_implementation

    class Ungated(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts = shape.num_experts
            self.up_proj, self.down_proj = weights.up, weights.down
            self.up_proj_bias, self.down_proj_bias = weights.up_bias, weights.down_bias

        def act_fn(self, h: Tensor) -> Tensor:
            return activate(h, shape.activation)

        def forward(self, x_TD: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor) -> Tensor:
            """Run the loop over the chosen experts that transformers' models have as `eager`."""
            out_TD = torch.zeros_like(x_TD)
            one_hot_EKT = nn.functional.one_hot(expert_ids_TK, self.num_experts).permute(2, 1, 0)
            for (expert,) in one_hot_EKT.sum((-1, -2)).nonzero().tolist():
                choice, token = torch.where(one_hot_EKT[expert])
                h = nn.functional.linear(
                    x_TD[token], self.up_proj[expert], _of(weights.up_bias, expert)
                )
                y = nn.functional.linear(
                    self.act_fn(h), self.down_proj[expert], _of(weights.down_bias, expert)
                )
                out_TD.index_add_(0, token, y * gate_TK[token, choice, None])
            return out_TD

    wrap = use_experts_implementation(has_gate=False, has_bias=shape.bias)
    experts: Experts = wrap(Ungated)(config)
    return experts


def _of(bias_EO: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_EO is None else bias_EO[expert]
