"""Blocks under `torch.compile`."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile each of the model's blocks where it is first called; equal ones share one graph.

    Swin's differ in width, shift, layer and what the state before them carries: a dozen kinds, and
    the compiler's patience ends at eight, after which blocks run uncompiled without a word. A
    second width is another kind and not, as the compiler would guess, the first of many.
    """
    blocks = list(cast(Iterable[nn.Module], model.blocks))
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    for block in blocks:
        block.compile(backend=backend, dynamic=False)
