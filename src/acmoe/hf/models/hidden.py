"""Options of transformers that read or write positions and hidden states.

B sequences, L new positions, N cached and new positions, D features.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from acmoe.errors import check
from acmoe.hf.models.checks import check_all

_UNUSUAL = (
    "position_ids do not count the tokens of each text from 0; the positions of this model are "
    "relative and texts cannot be packed into one row: leave position_ids out"
)


def wants_hidden_states(config: PreTrainedConfig, asked: bool | None) -> bool:
    """Return the argument of a call, or the config's field where the call gives none."""
    return bool(config.output_hidden_states if asked is None else asked)


@contextmanager
def recorded_inputs(blocks: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the (B, L, D) inputs of the blocks inside `with`; the first is the embedding."""
    found: list[Tensor] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0])

    handles = [block.register_forward_pre_hook(note) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def check_positions(
    position_ids: Tensor | None,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    seen: int = 0,
) -> None:
    """Raise a UserError unless position ids count 0, 1, 2, ... from the first token of each text.

    Args:
        position_ids: (B, L) or (1, L); None is always right, since positions are relative.
        input_ids: (B, L).
        attention_mask: (B, N), 0 at padding, whose ids are not read.
        seen: number of cached positions.
    """
    if position_ids is None:
        return
    length = input_ids.shape[1]
    usual = torch.arange(seen, seen + length, device=input_ids.device).expand_as(input_ids)
    real = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        usual = (attention_mask.long().cumsum(-1) - 1)[:, -length:]
        real = attention_mask[:, -length:].bool()
    rows, columns = input_ids.shape
    check(
        position_ids.dim() == 2
        and position_ids.shape[0] in (1, rows)
        and position_ids.shape[1] == columns,
        f"position_ids have shape {tuple(position_ids.shape)}; give {(rows, columns)}, or leave "
        "position_ids out",
    )
    check_all((position_ids == usual) | ~real, _UNUSUAL)
