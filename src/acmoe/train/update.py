"""The step of an optimizer, and the results of micro-batches and of a whole update.

E experts.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from acmoe.distributed.clip import clip_gradients
from acmoe.ops.route.reference import load
from acmoe.routing.state import Routing

# Types of device whose fused optimizers ignore `found_inf` (torch up to 2.13, see
# https://github.com/pytorch/pytorch/pull/186360). The host reads it there, in every update.
IGNORING_FOUND_INF = frozenset({"mps"})


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


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None,
    finite: Tensor,
) -> Tensor:
    """Update weights and running statistics, and return () whether the update was finite.

    `finite` tells whether the losses are finite. Where gradients are clipped, their norm is checked
    as well.
    """
    if clip is not None:
        finite = finite & clip_gradients(model.parameters(), clip).isfinite()
    # The fused optimizer kernel skips its update where found_inf is 1. The weights then stay those
    # that gave the first bad loss, and can be examined when the host next reads the losses.
    if finite.device.type not in IGNORING_FOUND_INF:
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
    elif not finite:
        optimizer.zero_grad()
        return finite
    apply_gradients(optimizer)
    return finite


def apply_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer, which also updates the running statistics, and clear the gradients."""
    optimizer.step()
    optimizer.zero_grad()
