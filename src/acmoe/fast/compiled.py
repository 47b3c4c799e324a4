"""Apply `torch.compile` to a model's blocks."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile each block of the model, lazily at its first call; equal blocks share one graph.

    Raise Dynamo's recompile limit: Swin's blocks differ in width, shift, layer and incoming routing
    state, about a dozen kinds, and beyond the default limit of eight Dynamo silently runs blocks
    uncompiled. dynamic=False compiles another graph for each width instead of dynamic shapes.
    """
    blocks = list(cast(Iterable[nn.Module], model.blocks))
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    for block in blocks:
        block.compile(backend=backend, dynamic=False)
    runner = getattr(model, "runner", None)
    if runner is not None and hasattr(runner, "compile"):  # a fast runner does not call the blocks
        runner.compile(backend=backend, dynamic=False)
