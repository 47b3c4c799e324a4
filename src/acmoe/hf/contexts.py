"""The contexts of the calls of decoder layers that are under way, by which routers find them.

A context is kept in a thread-local variable, so that threads can share a model, and for compiled
code, which cannot read that, in an attribute of the router's part. Some hooks of a call may be
compiled and others not: Dynamo runs a function uncompiled once it has compiled it too often
(`recompile_limit`), and somebody may compile a part of a layer.
"""

import threading
from dataclasses import dataclass, field
from weakref import ref

import torch

from acmoe.errors import UserError
from acmoe.hf.adaptive import AdaptivePart, LayerContext
from acmoe.hf.tape import Tape


class _ThreadContexts(threading.local):
    """The contexts of the calls under way in this thread, by the id of the router's part."""

    def __init__(self) -> None:
        self.by_part: dict[int, LayerContext] = {}


@dataclass
class SharedContext(LayerContext):
    """A placeholder in the attribute while several threads are in a layer; routers refuse it.

    References are weak, so that a thread that ended in the middle of a call does not count.
    """

    calls: list[ref[LayerContext]] = field(default_factory=list)


_CONTEXTS = _ThreadContexts()
_LOCK = threading.Lock()  # guards the attribute `context` of all parts


def context_of(part: AdaptivePart) -> LayerContext:
    """Return the context of the layer's call under way, for a router inside the layer."""
    context = None if torch.compiler.is_compiling() else _CONTEXTS.by_part.get(id(part))
    if context is None or context.done:
        context = part.context
    if context is None or isinstance(context, SharedContext):
        raise UserError(
            f"{part.name} was called outside of its decoder layer, several threads call a model of "
            "which a part is compiled, or it is a copy (modules_to_save of PEFT); call the whole "
            "model, compile it as a whole, or name the router in target_parameters"
        )
    return context


def open_context(part: AdaptivePart, context: LayerContext) -> None:
    """Make it the context of a router's part, at the beginning of its layer's call."""
    if torch.compiler.is_compiling():
        part.context = context
        return
    before = _CONTEXTS.by_part.get(id(part))
    if before is not None:
        before.done = True  # its call was interrupted
    _CONTEXTS.by_part[id(part)] = context
    with _LOCK:
        others = _calls_under_way(part)
        if not others:
            part.context = context
            return
        # While two threads are in the layer, the attribute holds the context of neither.
        calls = [*others, ref(context)]
        part.context = SharedContext(Tape(gradient=False), 0, 0, calls=calls)


def close_context(part: AdaptivePart) -> None:
    """End the context of a router's part."""
    if torch.compiler.is_compiling():
        if part.context is not None and not isinstance(part.context, SharedContext):
            part.context.done = True
            part.context = None
        return
    context = _CONTEXTS.by_part.pop(id(part), None)
    with _LOCK:
        if context is None or context.done:
            context = part.context
        if context is not None:
            context.done = True
        if not _calls_under_way(part):
            part.context = None


def _calls_under_way(part: AdaptivePart) -> list[ref[LayerContext]]:
    """Return the calls of the part's layer that have not ended, of all threads."""
    context = part.context
    if context is None:
        return []
    calls = context.calls if isinstance(context, SharedContext) else [ref(context)]
    return [call for call in calls if (one := call()) is not None and not one.done]
