"""Options that change with training: a count of optimizer steps, and the exponent that fades M."""

import torch
from torch import Tensor

from acmoe.routing.statistics.step import StepStatistics


class StepCount(StepStatistics):
    """The number of optimizer steps that followed a training forward.

    Micro-batches of one step count once, and evaluation does not count. The number is a buffer:
    checkpoints keep it, and a captured CUDA graph reads its present value.
    """

    step: Tensor
    last_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float32 counts exactly up to 16 million steps.
        self.register_buffer("step", torch.zeros(()))
        # 1 if a training forward has come since the last update, else 0.
        self.register_buffer("last_seen", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def record(self) -> None:
        """Note that a training forward has come; a repetition of one notes it again."""
        self.last_seen.fill_(1.0)

    def share(self, steps: int) -> Tensor:
        """Return step / steps, at most 1: a float64 scalar on the device, without a device sync."""
        return (self.step.double() / steps).clamp(max=1)

    @torch.no_grad()
    def update(self) -> None:
        """Count an optimizer step, if a training forward has come since the one before."""
        self.step.add_(self.last_seen)  # every process of a data parallel run counts its own
        self.last_seen.zero_()


class Fade(StepCount):
    """The exponent of M that falls linearly from 1 to 0 in `steps` optimizer steps, and stays."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self) -> Tensor:
        """Return the exponent, a float64 scalar; exactly 0 after `steps` steps."""
        return 1 - self.share(self.steps)
