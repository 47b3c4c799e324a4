"""Run the blocks of a language model one after the other.

`LanguageModel.runner` holds the function that does so: `run_blocks`, which is the definition, or a
faster one that `acmoe.fast.accelerate` installs.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from acmoe.models.text.memory import OpenMemory
from acmoe.ops.recompute import recompute
from acmoe.routing.state import RoutingState

if TYPE_CHECKING:
    from acmoe.models.text.decoder import LanguageModel


class BlockInputs(NamedTuple):
    """The arguments that all blocks of a call share."""

    positions: Tensor | None  # (P, span) relative-position embedding; None: rotary positions
    key_mask: Tensor | None = None  # (B, N) True where a position of the context may be attended to
    token_mask: Tensor | None = (
        None  # (B, L) True where a token of the segment is real, not padding
    )
    token_ids: Tensor | None = None  # (B, L) for routers that read them


class BlockRunner(Protocol):
    """A function that runs a model's blocks on the embedded tokens x (B, L, D)."""

    def __call__(
        self,
        model: "LanguageModel",
        x: Tensor,
        state: RoutingState,
        memory: OpenMemory,
        inputs: BlockInputs,
    ) -> tuple[Tensor, RoutingState]: ...


def run_blocks(
    model: "LanguageModel", x: Tensor, state: RoutingState, memory: OpenMemory, inputs: BlockInputs
) -> tuple[Tensor, RoutingState]:
    """Return the hidden states (B, L, D) after the last block, and the last routing state."""
    for depth, block in enumerate(model.blocks):
        x = model.blank_padding(x, inputs.token_mask)
        context = memory.extend(depth, x)
        call = partial(recompute, block) if recomputes(model) else block
        x, state = call(x, state, context, inputs, memory.cache(depth))
    return x, state


def recomputes(model: "LanguageModel") -> bool:
    """Return True if backward recomputes the activations inside a block."""
    return model.checkpoint_blocks and torch.is_grad_enabled()
