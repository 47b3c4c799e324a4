"""Count a model's parameters, in total and those active for one token."""

from typing import NamedTuple

from torch import nn

from acmoe.experts.moe import MoE


class ParameterCount(NamedTuple):
    """Number of parameters."""

    total: int
    active: int  # without the experts that a token is not sent to


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameters by shape; a model on the meta device works too."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for layer in model.modules():
        if isinstance(layer, MoE):
            experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            idle += experts * (layer.num_experts - layer.top_k) // layer.num_experts
    return ParameterCount(total, total - idle)
