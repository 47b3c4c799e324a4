"""Put adaptive parts and hooks on the routers of a transformers model, and take them off.

Only hooks and one submodule per router are added. The class of the model stays; `attach` changes it
(`acmoe.hf.checkpoints.classes`).
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from acmoe.errors import UserError, check
from acmoe.hf.adaptive import AdaptivePart
from acmoe.hf.checkpoints.options import AttachOptions
from acmoe.hf.discovery import FoundRouter, RouterStack, find_stacks
from acmoe.hf.hooks import (
    PLACE,
    AfterLayer,
    AfterStack,
    BeforeLayer,
    BeforeStack,
    after_router,
    before_router,
    check_arguments,
    layer_numbers,
)
from acmoe.hf.placement import adaptive_routers
from acmoe.ops.dispatch import log_once
from acmoe.routing.router import Router

HANDLES = "_acmoe_handles"  # attribute of a module: the handles of the hooks put on it


def add_parts(model: nn.Module, options: AttachOptions) -> None:
    """Make the routers of the model adaptive by parts and hooks, as the options say."""
    check_model(model)
    stacks = find_stacks(model)
    for found in (router for stack in stacks for router in stack.routers):
        check(
            not hasattr(found.module, PLACE),
            f"{type(model).__name__} is attached already; call acmoe.detach(model) first",
        )
    for stack in stacks:
        check_arguments(stack.stack)
    placed = adaptive_routers(stacks, skip=options.skip, layers=options.layers)
    with float32_default():
        parts = [
            build_parts(stack, depths, options)
            for stack, depths in zip(stacks, placed, strict=True)
        ]
    for stack, own in zip(stacks, parts, strict=True):
        if own:
            _attach_stack(stack, own)


def remove_parts(model: nn.Module) -> None:
    """Take off the parts and hooks of `add_parts`."""
    for router, part in attached_parts(model).items():
        part.give_back_jitter(router)
        delattr(router, PLACE)
    for module in model.modules():
        for handle in module.__dict__.pop(HANDLES, ()):
            handle.remove()


def attached_parts(model: nn.Module) -> dict[nn.Module, AdaptivePart]:
    """Return the parts that `attach` put into a model, by their routers."""
    found = ((module, getattr(module, PLACE, None)) for module in model.modules())
    return {module: part for module, part in found if isinstance(part, AdaptivePart)}


def check_model(model: object) -> None:
    """Raise a UserError for a model that cannot take hooks as it is."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}; pass a model of transformers")
    attached = any(isinstance(module, AdaptivePart) for module in model.modules())
    own = next((module for module in model.modules() if isinstance(module, Router)), None)
    check(
        attached or own is None,
        f"{type(model).__name__} has routers of acmoe ({type(own).__name__}), which attach is not "
        "for; build the model with router='adaptive' instead",
    )
    compiled = any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )
    check(not compiled, "model is compiled already; call acmoe.attach before torch.compile")
    wrapped = any(isinstance(module, nn.DataParallel) for module in model.modules())
    check(not wrapped, "model is in an nn.DataParallel; use DistributedDataParallel (torchrun)")


def build_parts(
    stack: RouterStack, depths: set[int], options: AttachOptions
) -> dict[int, AdaptivePart]:
    """Return the parts of the routers at `depths` and of those before them, by depth."""
    config = options.config
    return {
        depth: AdaptivePart(
            found,
            depth,
            reads=config if depth in depths else None,
            next_router=config if depth + 1 in depths else None,
            blend_steps=options.blend_steps,
        )
        for depth, found in enumerate(stack.routers)
        if depth in depths or depth + 1 in depths
    }


@contextlib.contextmanager
def float32_default() -> Iterator[None]:
    """Create tensors in float32, also while transformers builds a model of another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _attach_stack(stack: RouterStack, parts: dict[int, AdaptivePart]) -> None:
    """Put the parts on their routers, and hooks on routers, layers and the stack."""
    inside: dict[int, list[AdaptivePart]] = {id(layer): [] for layer in stack.layers}
    for depth, part in parts.items():
        found = stack.routers[depth]
        inside[id(found.layer)].append(part)
        _attach_router(found, part, stack.stack)
    for layer in stack.layers:
        own = tuple(inside[id(layer)])
        before = BeforeLayer(layer, own)
        before.register(layer)
        _keep(layer, layer.register_forward_pre_hook(before, with_kwargs=True))
        if own:
            _keep(layer, layer.register_forward_hook(AfterLayer(own), always_call=True))
    own, module = tuple(parts.values()), stack.stack
    new = BeforeStack(stack.name, module, own)
    end = AfterStack(stack.name, own, layer_numbers(stack))
    _keep(module, module.register_forward_pre_hook(new, with_kwargs=True))
    _keep(module, module.register_forward_hook(end, with_kwargs=True))


def _attach_router(found: FoundRouter, part: AdaptivePart, stack: nn.Module) -> None:
    router = found.module
    if found.note is not None and part.reader is not None:
        log_once(f"{type(router).__name__} {found.note}", logging.WARNING)
    part.to(_device_of(router, stack)).train(router.training)
    part.take_jitter(router, found.jitter)
    router.add_module(PLACE, part)
    _keep(router, router.register_forward_pre_hook(before_router, with_kwargs=True))
    # Before all other hooks: expert parallelism replaces the chosen ids by local ones.
    _keep(router, router.register_forward_hook(after_router, prepend=True))


def _keep(module: nn.Module, handle: RemovableHandle) -> None:
    module.__dict__.setdefault(HANDLES, []).append(handle)


def _device_of(router: nn.Module, stack: nn.Module) -> torch.device:
    """Return the device on which the router computes.

    Where its parameters are on the meta device, it is that of the stack's buffers: accelerate's
    `init_empty_weights` leaves these on the CPU, and loads later what a checkpoint holds.
    """
    tensor = next(iter((*router.parameters(), *router.buffers())), None)
    device = torch.get_default_device() if tensor is None else tensor.device
    if device.type != "meta":
        return device
    # accelerate keeps the parameters of an offloaded module on the meta device between calls.
    offloaded = getattr(getattr(router, "_hf_hook", None), "execution_device", None)
    buffers = (buffer.device for buffer in stack.buffers() if not buffer.is_meta)
    return next(buffers, device) if offloaded is None else torch.device(offloaded)
