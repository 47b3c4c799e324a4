"""The hooks of an attached model. They carry the tape of a forward pass to its routers.

    before the stack    put a new `Tape` into the keyword arguments
    before a layer      take it out, and make it the context of the layer's routers for this call
    before a router     rescale its input by the state of the router before it
    after a router      write its state for the next one
    after a layer       remove the context
    after the stack     raise if a router was left out; keep prefix statistics in the cache

Hooks are objects whose modules are attributes: a closure would stay with the original model when
the model is copied. A context is kept in a thread-local variable, so that threads can share a
model, and for compiled code, which cannot read that, in an attribute of the router's part.
Some hooks of a call may be compiled and others not: Dynamo runs a function uncompiled once it has
compiled it too often (`recompile_limit`), and somebody may compile a part of a layer.
"""

import inspect
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.hf.adaptive import AdaptivePart, LayerContext
from acmoe.hf.cache import cache_of, store_slots
from acmoe.hf.checkpoints.wrappers import check_adapter
from acmoe.hf.tape import KEY, Tape, new_tape
from acmoe.routing.statistics.registry import register_layer

PLACE = "adaptive"  # name of the part on its router


class _ThreadContexts(threading.local):
    """The contexts of the calls under way in this thread, by the id of the router's part."""

    def __init__(self) -> None:
        self.by_part: dict[int, LayerContext] = {}


@dataclass
class SharedContext(LayerContext):
    """Stands in the attribute while several threads are in a layer: it has the context of none.

    References are weak, so that a thread that ended in the middle of a call does not count.
    """

    calls: list[ref[LayerContext]] = field(default_factory=list)


_CONTEXTS = _ThreadContexts()
_LOCK = threading.Lock()  # of the attribute `context` of all parts


def part_of(router: nn.Module) -> AdaptivePart:
    part = getattr(router, PLACE)
    assert isinstance(part, AdaptivePart)
    return part


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


def check_arguments(stack: nn.Module) -> None:
    """Raise a UserError if the tape cannot be among the arguments of a stack's call."""
    kinds = [one.kind for one in inspect.signature(type(stack).forward).parameters.values()]
    check(
        inspect.Parameter.VAR_KEYWORD in kinds,
        f"{type(stack).__name__}.forward takes no **kwargs, in which attach puts the record of a "
        "call for the layers; add **kwargs to it, and pass them on to each layer's call",
    )


class BeforeStack:
    """Puts a new tape into the arguments of a call of the stack."""

    def __init__(self, name: str, stack: nn.Module, parts: tuple[AdaptivePart, ...]) -> None:
        self.name = name
        self.parts = parts
        self.arguments = tuple(inspect.signature(type(stack).forward).parameters)[1:]

    def __call__(
        self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check(
            not getattr(stack, "_is_replica", False),
            "nn.DataParallel copies an attached model for each call, and its statistics with it; "
            "use DistributedDataParallel (torchrun), or one device",
        )
        dropped = getattr(stack, "layerdrop", 0.0) if stack.training else 0.0
        check(
            dropped == 0,
            f"{self.name or type(stack).__name__} skips layers at random in training (layerdrop="
            f"{dropped}), and an adaptive router needs the choice of the MoE layer before it; set "
            f"model.get_submodule({self.name!r}).layerdrop = 0.0",
        )
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        found = (part.statistics for part in self.parts)
        statistics = next((one for one in found if one is not None), None)
        return args, {**kwargs, KEY: new_tape(given, self.name, statistics)}


class AfterStack:
    """Ends the tape, raises if a router was not called, keeps new decode slots in the cache."""

    def __init__(self, name: str, parts: tuple[AdaptivePart, ...]) -> None:
        self.name = name
        self.parts = parts

    def __call__(
        self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tape = kwargs[KEY]
        tape.ended = True
        missing = [part.name for part in self.parts if part.depth not in tape.called]
        if missing:
            raise UserError(
                f"{len(self.parts) - len(missing)} of {len(self.parts)} routers were called, not "
                f"{missing[0]}: its block was replaced (use_kernels=True) or skipped; run the "
                "model without that, or call acmoe.detach(model)"
            )
        if tape.new_slots:
            cache = kwargs.get("past_key_values")
            cache = cache_of(output) if cache is None else cache
            if cache is not None:
                store_slots(cache, self.name, tape.new_slots)


def router_place(layer: nn.Module, part: AdaptivePart) -> tuple[str, nn.Module, str]:
    """Return a router's name in the model, the module that holds it, and its name there.

    PEFT may later put a layer of its own around the router, in this place.
    """
    held = ((module, *child) for module in layer.modules() for child in module._modules.items())
    block, name = next(
        (block, name) for block, name, one in held if getattr(one, PLACE, None) is part
    )
    return part.name, block, name


class BeforeLayer:
    """Takes the tape out of a decoder layer's arguments, and sets the context of its routers."""

    places: tuple[tuple[str, nn.Module, str], ...] = ()  # a pickle of an earlier version has none

    def __init__(self, layer: nn.Module, parts: tuple[AdaptivePart, ...]) -> None:
        self.parts = parts
        self.places = tuple(router_place(layer, part) for part in parts)
        self.registered = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "registered": False}  # a copy of the layer registers itself anew

    def register(self, layer: nn.Module) -> None:
        """Give the statistics in the layer to the optimizer that trains the layer."""
        if self.parts and not self.registered:
            register_layer(layer)
            self.registered = True

    def check_values(self, x: Tensor) -> None:
        """Raise a UserError if the statistics have no values, and x has some; keep their dtype."""
        for part in self.parts:
            part.keep_float32()
        empty = None if x.is_meta else next((part for part in self.parts if part.on_meta), None)
        if empty is not None:
            raise UserError(
                f"{empty.name} has no statistics: they are on the meta device, where accelerate "
                "puts offloaded buffers; dispatch with offload_buffers=False, or load the model by "
                "from_pretrained"
            )

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = dict(kwargs)
        tape = kwargs.pop(KEY, None)
        if not self.parts:
            return args, kwargs
        x = args[0] if args else kwargs.get("hidden_states")
        if tape is None or not isinstance(x, Tensor):
            raise UserError(
                f"{type(layer).__name__} was called without the record of its model's call; call "
                "the whole model, whose forward must pass its **kwargs on to its layers, or "
                "acmoe.detach(model) to call a layer alone"
            )
        if not torch.compiler.is_compiling():
            self.register(layer)
            self.check_values(x)
            for router, block, name in self.places:
                check_adapter(router, block._modules.get(name) or block)
        context = LayerContext(tape, *x.shape[:2])
        for part in self.parts:
            open_context(part, context)
        return args, kwargs


class AfterLayer:
    """Removes the context of a layer's routers, also after an exception."""

    def __init__(self, parts: tuple[AdaptivePart, ...]) -> None:
        self.parts = parts

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for part in self.parts:
            close_context(part)


def before_router(
    router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rescale the router's first argument, the hidden states."""
    part = part_of(router)
    context = context_of(part)
    x = args[0] if args else kwargs["hidden_states"]
    part.add_jitter(x)
    context.x = x
    scaled = part.rescale(x, context)
    return ((scaled, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": scaled})


def after_router(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Record the router's choice. It leaves the output as it is."""
    part = part_of(router)
    context = context_of(part)
    assert context.x is not None
    part.record(context.x, output, context)
    context.x = None
