"""How many parameters a model has, and how many a token meets."""

from typing import NamedTuple

from torch import nn

from acmoe.experts.moe import MoE


class ParameterCount(NamedTuple):
    total: int
    active: int  # all but the experts a token is not sent to


def count_parameters(model: nn.Module) -> ParameterCount:
    """Counts by shape, so a model on the meta device will do."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for layer in model.modules():
        if isinstance(layer, MoE):
            experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            idle += experts * (layer.num_experts - layer.top_k) // layer.num_experts
    return ParameterCount(total, total - idle)
