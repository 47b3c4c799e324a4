"""Record the routings that a model's MoE layers decide in one forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.routing.state import Routing


@contextmanager
def recorded(layers: Sequence[MoE | SoftMoE]) -> Iterator[list[Routing]]:
    """Collect the routings of the layers inside `with`; a recompute in backward adds nothing."""
    found: list[Routing] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[1])  # `next_state` is handed (x, routing, state)

    handles = [layer.next_state.register_forward_pre_hook(note) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
