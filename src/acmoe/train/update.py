"""The results of micro-batches, and of one optimizer update.

E experts.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acmoe.ops.route.reference import load
from acmoe.routing.state import Routing


class Output(Protocol):
    """The fields of a model's output that an update reads."""

    @property
    def loss(self) -> Tensor | None: ...
    @property
    def aux_loss(self) -> Tensor: ...
    @property
    def routings(self) -> tuple[Routing, ...] | None: ...


class Update(NamedTuple):
    """The result of one optimizer update, on the device: reading it waits for the update."""

    loss: Tensor  # () mean nats per token, or per image
    aux_loss: Tensor  # ()
    finite: Tensor  # () False: losses, or clipped gradients, were not finite; weights are unchanged
    loads: tuple[Tensor, ...]  # (E,) routed tokens of each MoE layer; empty unless recorded


def expert_loads(parts: Sequence[Sequence[Routing]], num_experts: int) -> tuple[Tensor, ...]:
    """Return (E,) routed tokens of each expert for every MoE layer, summed over micro-batches."""
    return tuple(
        torch.stack([load(routing.expert_ids, num_experts) for routing in layer]).sum(0)
        for layer in zip(*parts, strict=True)
    )


def mean(values: list[Tensor | None]) -> Tensor:
    """Return () the mean of the losses of all micro-batches, detached."""
    return torch.stack([value.detach() for value in values if value is not None]).mean()
