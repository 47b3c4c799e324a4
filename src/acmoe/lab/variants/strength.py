"""A scheduled or learned lambda of Theorem 1."""

import math

import torch
from torch import Tensor, nn

from acmoe.lab.variants.config import VariantConfig
from acmoe.routing.step import StepStatistics


class Strength(StepStatistics):
    """One lambda for all clusters of a layer.

    A scheduled lambda changes by the same factor in each optimizer step until it reaches its end.
    The parameter of a learned lambda is its logarithm: lambda stays positive, and an optimizer step
    changes it by a fraction of itself, whatever its unit.
    """

    config: VariantConfig
    step: Tensor
    last_seen: Tensor

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        assert config.strength is not None
        self.config = config
        self.log_strength: nn.Parameter | None = None
        if config.learn_strength:
            self.log_strength = nn.Parameter(torch.tensor(math.log(config.strength)))
        else:
            # float32 counts exactly up to 16 million steps.
            self.register_buffer("step", torch.zeros(()))
            # 1 if a training forward has come since the last update, else 0.
            self.register_buffer("last_seen", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def record(self) -> None:
        """Note that a training forward has used lambda; a repetition of one notes it again."""
        if self.log_strength is None:
            self.last_seen.fill_(1.0)

    def forward(self) -> Tensor:
        """Return lambda, a float64 scalar on the device, without a device sync."""
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
    def update(self) -> None:
        """Count an optimizer step, if a training forward has come since the one before."""
        if self.log_strength is None:
            self.step.add_(self.last_seen)  # every process of a data parallel run counts its own
            self.last_seen.zero_()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.log_strength is not None:
            assert self.config.strength is not None
            self.log_strength.fill_(math.log(self.config.strength))
