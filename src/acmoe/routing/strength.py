"""Lambda of Theorem 1 where it is no constant: scheduled, or learned."""

import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.routing.step import StepStatistics


class Strength(StepStatistics):
    """One lambda for a layer's clusters.

    Scheduled, it moves by the same factor in each optimizer step, and then stays. Learned, its
    logarithm is a parameter: lambda stays positive, and a step is a share of it, whatever its unit.
    """

    step: Tensor

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        assert config.strength is not None
        self.config = config
        self.log_strength: nn.Parameter | None = None
        if config.learn_strength:
            self.log_strength = nn.Parameter(torch.tensor(math.log(config.strength)))
        else:
            # float32 counts exactly up to 16 million steps.
            self.register_buffer("step", torch.zeros(()))

    def forward(self) -> Tensor:
        """() float64 lambda, on the device: no host waits for it."""
        if self.log_strength is not None:
            return self.log_strength.double().exp()
        start, end, steps = (
            self.config.strength,
            self.config.strength_end,
            self.config.strength_steps,
        )
        assert start is not None and end is not None and steps is not None
        share = (self.step.double() / steps).clamp(max=1)
        return (math.log(start) + share * (math.log(end) - math.log(start))).exp()

    @torch.no_grad()
    def fold(self) -> None:
        if self.log_strength is None:
            self.step.add_(1)
