"""The hooks of an attached model. They carry the tape of a forward pass to its routers.

    before the stack    put a new `Tape` into the keyword arguments
    before a layer      take it out, and make it the context of the layer's routers for this call
    before a router     rescale its input by the state of the router before it
    after a router      write its state for the next one
    after a layer       remove the context
    after the stack     raise if a router was left out; keep prefix statistics in the cache

Hooks are objects whose modules are attributes: a closure would stay with the original model when
the model is copied. contexts.py keeps the contexts.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.hf.adaptive import AdaptivePart, LayerContext
from acmoe.hf.cache import cache_of, store_slots
from acmoe.hf.checkpoints.wrappers import check_adapter
from acmoe.hf.contexts import close_context, context_of, open_context
from acmoe.hf.discovery import RouterStack
from acmoe.hf.tape import KEY, new_tape
from acmoe.routing.statistics.registry import register_layer

PLACE = "adaptive"  # name of the part on its router


def part_of(router: nn.Module) -> AdaptivePart:
    part = getattr(router, PLACE)
    assert isinstance(part, AdaptivePart)
    return part


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

    layer_numbers: Mapping[int, int] = {}  # a pickle of an earlier version has none

    def __init__(
        self, name: str, parts: tuple[AdaptivePart, ...], layer_numbers: Mapping[int, int]
    ) -> None:
        self.name = name
        self.parts = parts
        self.layer_numbers = layer_numbers  # by depth; empty where the config does not count them

    def __call__(
        self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tape = kwargs[KEY]
        tape.ended = True
        self.check_called(stack, tape.called)
        if tape.new_slots:
            cache = kwargs.get("past_key_values")
            cache = cache_of(output) if cache is None else cache
            if cache is not None:
                store_slots(cache, self.name, tape.new_slots)

    def check_called(self, stack: nn.Module, called: set[int]) -> None:
        """Raise a UserError if a router was left out that another needs.

        `generate(assistant_early_exit=n)` drafts with the first n layers: it lowers
        `config.num_hidden_layers` meanwhile. Running statistics of the others are not needed then.
        The other modes refuse such a call: they cannot be drafted with, and the error that says so
        would leave the config lowered, with which later calls would run n layers in silence.
        """
        missing = [part for part in self.parts if part.depth not in called]
        if not missing:
            return
        count = getattr(getattr(stack, "config", None), "num_hidden_layers", 0)
        beyond = [part for part in missing if self.layer_numbers.get(part.depth, -1) >= count]
        mode = next(part.statistics.mode for part in self.parts if part.statistics is not None)
        if len(beyond) == len(missing):
            check(
                mode == "running",
                f"config.num_hidden_layers={count} leaves out {missing[0].name} (so does "
                f"assistant_early_exit), which only running statistics allow, not {mode!r}; set "
                "it back to the number of layers, and generate without assistant_early_exit",
            )
            return
        raise UserError(
            f"{len(self.parts) - len(missing)} of {len(self.parts)} routers were called, not "
            f"{missing[0].name}: its block was replaced (use_kernels=True) or skipped; run the "
            "model without that, or call acmoe.detach(model)"
        )


def layer_numbers(stack: RouterStack) -> dict[int, int]:
    """Return the numbers of the routers' decoder layers, by the routers' depths.

    Empty unless `config.num_hidden_layers` is the number of the stack's layers.
    """
    count = getattr(getattr(stack.stack, "config", None), "num_hidden_layers", None)
    if count != len(stack.layers):
        return {}
    numbers = {id(layer): number for number, layer in enumerate(stack.layers)}
    return {depth: numbers[id(found.layer)] for depth, found in enumerate(stack.routers)}


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
