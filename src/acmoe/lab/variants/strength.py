"""A scheduled or learned lambda of Theorem 1: one for all clusters of a layer."""

import math

import torch
from torch import Tensor, nn

from acmoe.lab.variants.config import VariantConfig
from acmoe.lab.variants.steps import StepCount


class ScheduledStrength(StepCount):
    """A lambda that changes by the same factor in each optimizer step until it reaches its end."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self) -> Tensor:
        """Return lambda, a float64 scalar on the device, without a device sync."""
        start, end, steps = (
            self.config.strength,
            self.config.strength_end,
            self.config.strength_steps,
        )
        assert start is not None and end is not None and steps is not None
        share = self.share(steps)
        return (math.log(start) + share * (math.log(end) - math.log(start))).exp()


class LearnedStrength(nn.Module):
    """A lambda whose logarithm is a parameter.

    Lambda stays positive, and an optimizer step changes it by a fraction of itself, whatever its
    unit.
    """

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        assert config.strength is not None
        self.begin = math.log(config.strength)
        self.log_strength = nn.Parameter(torch.tensor(self.begin))

    def forward(self) -> Tensor:
        """Return lambda, a float64 scalar on the device, without a device sync."""
        return self.log_strength.double().exp()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.log_strength.fill_(self.begin)
