"""Record the routings that a model's MoE layers decide in one forward pass."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.routing.state import Routing


@contextmanager
def recorded(layers: Sequence[MoE | SoftMoE]) -> Iterator[list[Routing]]:
    """Collect the routings of the layers inside `with`; a recompute in backward adds nothing.

    Other threads that call the same layers also run the hooks; their routings are left out, except
    in compiled code, because torch.compile cannot trace the number of a thread.
    """
    if layers and torch.compiler.is_compiling():
        # torch.compile cannot trace the hooks, and breaks its graph. With fullgraph=True it raises
        # an error, which contains this text.
        torch._dynamo.graph_break(
            msg="return_routings=True observes the layers by hooks, which no graph contains; "
            "compile without fullgraph=True, or call acmoe.fast.compiled.compile_blocks(model)"
        )
    found: list[Routing] = []
    thread = None if torch.compiler.is_compiling() else threading.get_ident()

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        # Compiled code must not read `thread`: it would be compiled again for each thread.
        if torch.compiler.is_compiling() or thread in (None, threading.get_ident()):
            found.append(arguments[1])  # `next_state` is handed (x, routing, state)

    handles = [layer.next_state.register_forward_pre_hook(note) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
