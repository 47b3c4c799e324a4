"""A container that passes the routing state through the blocks of any model.

A block keeps its form y = block(x) and has an `MoEFFN` in place of its dense FFN. For one call of a
block, the stack puts the state into a `BlockContext`, which the `MoEFFN`s inside find in a
thread-local variable; they read the state there and replace it by the next one. No module stores
the state between calls, so two forward passes in flight, threads and activation checkpointing
(`checkpoint=True`) do not mix their states.

B sequences of L tokens, or T tokens; D features.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.ops.recompute import recompute
from acmoe.routing.origin import NextRouter
from acmoe.routing.rescaling import RescalingRouter
from acmoe.routing.state import RoutingState

AnyMoE = MoE | SoftMoE
COMPILED = "_orig_mod"  # name of the module that torch.compile has wrapped, in its wrapper


class BlockContext:
    """The routing state during one call of a block; each `MoEFFN` in turn reads and replaces it."""

    def __init__(
        self, state: RoutingState | None, arguments: dict[str, Tensor], waiting: "list[MoEFFN]"
    ) -> None:
        self.state = state
        self.arguments = arguments  # token_mask and token_ids, where they were given
        self.waiting = waiting  # the layers of the block that have not been called yet


class _ThreadContexts(threading.local):
    """The contexts of the calls under way in this thread, by the id of the `MoEFFN`."""

    def __init__(self) -> None:
        self.by_layer: dict[int, BlockContext] = {}


_CONTEXTS = _ThreadContexts()


# torch.compile breaks its graph here, if it comes here at all.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _thread_context(layer: nn.Module) -> BlockContext | None:
    return _CONTEXTS.by_layer.get(id(layer))


class MoEFFN(nn.Module):
    """An MoE layer with the call of a dense FFN, y = ffn(x), for blocks inside an `MoEStack`.

    It takes the arguments of `acmoe.MoE`, or an `acmoe.MoE` or `acmoe.SoftMoE` itself.
    """

    def __init__(self, moe: AnyMoE | None = None, **options: Any) -> None:
        super().__init__()
        check(
            moe is None or (isinstance(moe, AnyMoE) and not options),
            f"MoEFFN got {type(moe).__name__} and {sorted(options)}; pass an acmoe.MoE alone, or "
            "the arguments of one",
        )
        self.moe: AnyMoE = MoE(**options) if moe is None else moe
        # Only for compiled blocks: torch.compile cannot trace a thread-local variable.
        self.context: BlockContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped as x, without the residual."""
        context = _thread_context(self) if self.context is None else self.context
        if context is None:
            raise UserError(
                "MoEFFN was called where no acmoe.MoEStack passes it a routing state; call the "
                "stack that holds its block, and instead of checkpointing inside the block use "
                "MoEStack(..., checkpoint=True)"
            )
        y: Tensor
        y, context.state = self.moe(x, context.state, **context.arguments)
        context.waiting = [layer for layer in context.waiting if layer is not self]
        return y


class MoEStack(nn.Module):
    """Runs modules one after another and passes the routing state along: y, state = stack(x).

    modules      any of
                 - `acmoe.MoE`, `acmoe.SoftMoE`, or another stack, called as x, state = m(x, state)
                 - blocks that hold one or more `acmoe.MoEFFN`, called as x = block(x)
                 - any other module, called as x = m(x)
                 - what `torch.compile` makes of one of these
    checkpoint   True: recompute the activations of each module in the backward pass. Compile the
                 modules then, not the stack, whose checkpoints torch.compile cannot trace.

    The stack tells each MoE layer which router follows (`next_router`), in the order in which the
    modules are registered, unless the user has given the layer that argument. A `next_router`
    given to the last layer says what follows the stack; by default nothing does.

    >>> block = lambda: MoEFFN(dim=8, hidden=16, num_experts=4, top_k=2, router="adaptive")
    >>> stack = MoEStack(nn.Sequential(nn.LayerNorm(8), block()) for _ in range(3))
    >>> y, state = stack(torch.randn(2, 5, 8))
    >>> y.shape, state.aux_loss.shape
    (torch.Size([2, 5, 8]), torch.Size([]))
    """

    def __init__(self, *modules: nn.Module | Iterable[nn.Module], checkpoint: bool = False) -> None:
        super().__init__()
        for index, module in enumerate(_flattened(modules)):
            self.add_module(str(index), module)
        self.checkpoint = checkpoint
        plan_next_routers(list(self.moe_layers()))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children_in_order()

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children_in_order())[index]

    def children_in_order(self) -> Iterator[nn.Module]:
        """Yield every module as often as it is called; `children()` yields each only once."""
        for module in self._modules.values():
            assert module is not None
            yield module

    def moe_layers(self) -> Iterator[AnyMoE]:
        """Yield the MoE layers in the order in which the state passes through them."""
        for module in self.children_in_order():
            if isinstance(inner := getattr(module, COMPILED, module), MoEStack):
                yield from inner.moe_layers()
            elif isinstance(inner, AnyMoE):
                yield inner
            else:
                yield from (ffn.moe for ffn in layers_inside(module)[0])

    def forward(
        self,
        x: Tensor,
        state: RoutingState | None = None,
        token_mask: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        **block_arguments: Any,
    ) -> tuple[Tensor, RoutingState]:
        """Return the last module's output and the state after the last MoE layer.

        x                 (T, D) or (B, L, D)
        state             of the MoE layer before the stack; None if there is none
        token_mask        shaped as x without D, True for real tokens; goes to every MoE layer
        token_ids         for routers that read them
        block_arguments   go to every module that is not an MoE layer, such as an attention mask
        """
        given = {"token_mask": token_mask, "token_ids": token_ids}
        arguments = {name: value for name, value in given.items() if value is not None}
        for module in self.children_in_order():
            x, state = self._call(_step(module, arguments, block_arguments), x, state)
        if state is None:
            raise UserError(
                "MoEStack called no MoE layer; put acmoe.MoE layers or blocks with an acmoe.MoEFFN "
                "into it"
            )
        return x, state

    def _call(
        self, step: Callable[..., tuple[Tensor, ...]], x: Tensor, state: RoutingState | None
    ) -> tuple[Tensor, RoutingState | None]:
        """Run a step, which takes and returns x and the tensors of the state; see `checkpoint`."""
        tensors = () if state is None else tuple(state)
        if self.checkpoint and torch.is_grad_enabled():
            y, *after = recompute(step, x, *tensors)
        else:
            y, *after = step(x, *tensors)
        return y, RoutingState(*after) if after else None


def _step(
    module: nn.Module, arguments: dict[str, Tensor], block_arguments: dict[str, Any]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the call of a module as a function of x and the tensors of the state."""

    def step(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = RoutingState(*tensors) if tensors else None
        # A tuple: Dynamo of torch 2.10 traces no union.
        if isinstance(inner := getattr(module, COMPILED, module), (MoE, SoftMoE, MoEStack)):
            more = block_arguments if isinstance(inner, MoEStack) else {}
            y, state = module(x, state, **arguments, **more)
        else:
            y, state = call_block(module, x, state, arguments, block_arguments)
        return (y,) if state is None else (y, *state)

    return step


def call_block(
    block: nn.Module,
    x: Tensor,
    state: RoutingState | None,
    arguments: dict[str, Tensor],
    block_arguments: dict[str, Any],
) -> tuple[Tensor, RoutingState | None]:
    """Call y = block(x) with the state in its `BlockContext`; return y and the next state."""
    layers, compiled = layers_inside(block)
    context = BlockContext(state, arguments, layers)
    if compiled or torch.compiler.is_compiling():
        y = _call_compiled(block, layers, context, x, block_arguments)
    else:
        before = _CONTEXTS.by_layer
        _CONTEXTS.by_layer = before | {id(layer): context for layer in layers}
        try:
            y = block(x, **block_arguments)
        finally:
            _CONTEXTS.by_layer = before
    if context.waiting:
        raise UserError(
            f"{type(block).__name__} holds {len(layers)} MoEFFN and did not call "
            f"{len(context.waiting)} of them; call each in its forward, because the next layer's "
            "statistics come from there"
        )
    if not isinstance(y, Tensor):
        raise UserError(
            f"{type(block).__name__} returned {type(y).__name__}; a block of an MoEStack returns "
            "the hidden states alone"
        )
    return y, context.state


def _call_compiled(
    block: nn.Module,
    layers: list[MoEFFN],
    context: BlockContext,
    x: Tensor,
    block_arguments: dict[str, Any],
) -> Any:
    """Call the block with the context as an attribute of its layers: compiled code can read it."""
    for layer in layers:
        if layer.context is not None:
            raise UserError(
                "a compiled block of an MoEStack was called again before its first call ended; "
                "compiled blocks cannot run in two threads at once: compile the whole stack"
            )
        layer.context = context
    try:
        return block(x, **block_arguments)
    finally:
        for layer in layers:
            layer.context = None


def layers_inside(block: nn.Module) -> tuple[list[MoEFFN], bool]:
    """Return the `MoEFFN`s of a block, and True if a part of the block is compiled by itself."""
    if isinstance(block, (MoE, SoftMoE, MoEStack)):
        raise UserError(
            f"{type(block).__name__} inside a block of an MoEStack would not get the routing "
            "state; wrap an acmoe.MoE in acmoe.MoEFFN, and make a stack a module of the stack"
        )
    compiled = COMPILED in block._modules or block._compiled_call_impl is not None
    if isinstance(block, MoEFFN):
        return [block], compiled
    layers: list[MoEFFN] = []
    for child in block.children():
        found, part = layers_inside(child)
        layers, compiled = [*layers, *found], compiled or part
    return layers, compiled


def plan_next_routers(layers: list[AnyMoE]) -> None:
    """Set the next router of each MoE layer, for which the layer computes the state.

    A layer that occurs several times computes it for the rescaling router among its followers.
    """
    followers: dict[AnyMoE, list[NextRouter]] = {layer: [] for layer in layers}
    for layer, after in pairwise(layers):
        if isinstance(after.router, RescalingRouter):
            followers[layer].append(after.router.config)
    for layer, routers in followers.items():
        for router in routers:
            layer.next_state.plan(router, like=layer.experts.up)
        if not routers and not layer.next_state.fixed:
            layer.next_state.plan(None, like=layer.experts.up, final=False)


def _flattened(modules: tuple[nn.Module | Iterable[nn.Module], ...]) -> list[nn.Module]:
    """Return the modules of MoEStack(a, b) and of MoEStack([a, b])."""
    first = modules[0] if len(modules) == 1 else modules
    alone = isinstance(first, nn.Module) and not isinstance(first, nn.ModuleList)
    found: list[Any] = [first] if alone else list(first)  # type: ignore[arg-type]
    for module in found:
        check(
            isinstance(module, nn.Module),
            f"MoEStack got {type(module).__name__}; pass modules, or one list of modules",
        )
    return found
