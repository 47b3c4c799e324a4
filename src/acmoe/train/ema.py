"""An exponential moving average of a model's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, in float32, after every optimizer step.

    It begins with the initial weights, as in DeiT (timm's ModelEma). Only parameters are averaged.
    Buffers, such as the running statistics of adaptive routers, are the model's latest ones in the
    averaged model too. They are averages over recent batches already, and begin at zero, so that an
    average of them would be too small for the first 1 / (1 - decay) steps. They are measured with
    the trained weights, not with the averaged ones.

    `update` is device work only and may be captured in a CUDA graph.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names, self.weights = zip(*model.named_parameters(), strict=True)
        self.average = [weight.detach().float().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        torch._foreach_lerp_(self.average, list(self.weights), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside `with`, and its own ones back afterwards.

        Values are copied, not tensors exchanged: captured CUDA graphs keep reading the same memory.
        """
        own = [weight.detach().clone() for weight in self.weights]
        try:
            self._copy(self.average)
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the average from a state_dict of the averaged model."""
        for name, average in zip(self.names, self.average, strict=True):
            average.copy_(state[name])
