"""Make the MoE layers of a transformers model adaptive, and plain again.

The router of MoE layer m reads M_k* h in place of h, where k* is the token's first choice at MoE
layer m - 1; the experts read h. Only hooks and one submodule per router are added, so that all
code and weights of the model stay its own. The model gets a subclass of its class, by which it is
saved and loaded (`acmoe.hf.checkpoints.classes`).
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from acmoe.config.routing import AdaptiveConfig, SMoEConfig
from acmoe.errors import UserError, check
from acmoe.hf.adaptive import AdaptivePart
from acmoe.hf.checkpoints.classes import adopt, check_whole, release
from acmoe.hf.checkpoints.options import options_of
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

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    config: str | AdaptiveConfig = "adaptive",
    *,
    skip: int = 1,
    layers: Sequence[int] | None = None,
    blend_steps: int = 0,
) -> Model:
    """Make the MoE routers of a transformers model adaptive, in place, and return the model.

    Running statistics begin empty, with M = I: the logits of a fresh attach are bitwise those of
    the plain model. They move at every optimizer step, or by `acmoe.calibrate`.

    Args:
        model: A model of transformers 5.17 or later with MoE layers, of any family; or any module
            around one, such as a PEFT model.
        config: "adaptive", or an `AdaptiveConfig`. `running` and `prefix` statistics are causal
            and can be generated with; the fields `base` and `scale_experts` need acmoe's own
            layers.
        skip: Number of MoE layers in front that stay plain. The first always does, since nothing
            before it forms clusters, so 0 means 1. The paper's "Skip 1" is skip=2.
        layers: Depths of the adaptive MoE layers, counted from 0 among the MoE layers of each
            stack, in place of `skip`.
        blend_steps: Number of optimizer steps over which M_b = (1 - b) I + b M goes from the plain
            router, b = 0, to the adaptive one, b = 1. 0: b = 1 at once. See
            `acmoe.hf.set_blend`.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> import acmoe
    >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    >>> config = MixtralConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config).eval()
    >>> tokens = torch.tensor([[3, 14, 15, 9]])
    >>> before = model(tokens).logits
    >>> model = acmoe.attach(model, acmoe.AdaptiveConfig(statistics="running"))
    >>> torch.equal(model(tokens).logits, before)
    True
    """
    config = check_config(config)
    check(
        isinstance(blend_steps, int) and blend_steps >= 0,
        f"blend_steps={blend_steps!r}; it must be a whole number, 0 or more",
    )
    check_model(model)
    stacks = find_stacks(model)
    for found in (router for stack in stacks for router in stack.routers):
        check(
            not hasattr(found.module, PLACE),
            f"{type(model).__name__} is attached already; call acmoe.detach(model) first",
        )
    for stack in stacks:
        check_arguments(stack.stack)
    placed = adaptive_routers(stacks, skip=skip, layers=layers)
    with float32_default():
        parts = [
            build_parts(stack, depths, config, blend_steps)
            for stack, depths in zip(stacks, placed, strict=True)
        ]
    for stack, own in zip(stacks, parts, strict=True):
        if own:
            _attach_stack(stack, own)
    adopt(model, options_of(config, skip=skip, layers=layers, blend_steps=blend_steps))
    return model


def detach(model: Model) -> Model:
    """Take off what `attach` added, in place, and return the model: it is bitwise as before.

    The statistics are lost; save the model first to keep them.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> import acmoe
    >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    >>> config = MixtralConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> keys = list(model.state_dict())
    >>> list(acmoe.detach(acmoe.attach(model)).state_dict()) == keys
    True
    """
    parts = attached_parts(model)
    check(
        bool(parts),
        f"{type(model).__name__} has no attached router; pass the model that acmoe.attach got",
    )
    check_whole(model)
    for router, part in parts.items():
        part.give_back_jitter(router)
        delattr(router, PLACE)
    for module in model.modules():
        for handle in module.__dict__.pop(HANDLES, ()):
            handle.remove()
    release(model)
    return model


def attached_parts(model: nn.Module) -> dict[nn.Module, AdaptivePart]:
    """Return the parts that `attach` put into a model, by their routers."""
    found = ((module, getattr(module, PLACE, None)) for module in model.modules())
    return {module: part for module, part in found if isinstance(part, AdaptivePart)}


def check_config(config: object) -> AdaptiveConfig:
    """Return the config; raise a UserError for what only acmoe's own layers can do."""
    if config == AdaptiveConfig.name:
        return AdaptiveConfig()
    if type(config) is not AdaptiveConfig:
        shown = repr(config) if isinstance(config, str) else type(config).__name__
        raise UserError(
            f"config={shown} cannot be attached to a transformers model; pass 'adaptive' or an "
            "acmoe.AdaptiveConfig"
        )
    check(
        config.base == SMoEConfig(),
        f"base={type(config.base).__name__}(...) is not the default, and attach keeps the model's "
        "own router; leave base out",
    )
    check(
        not config.scale_experts,
        "scale_experts=True needs acmoe's own layers: attach rescales the router's input alone; "
        "use scale_experts=False",
    )
    return config


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
    stack: RouterStack, depths: set[int], config: AdaptiveConfig, blend_steps: int
) -> dict[int, AdaptivePart]:
    """Return the parts of the routers at `depths` and of those before them, by depth."""
    return {
        depth: AdaptivePart(
            found,
            depth,
            reads=config if depth in depths else None,
            next_router=config if depth + 1 in depths else None,
            blend_steps=blend_steps,
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
