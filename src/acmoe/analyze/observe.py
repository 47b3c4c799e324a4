"""Hooks that see what every MoE layer reads and decides, and change nothing.

T tokens, or B sequences of L tokens; D features, J clusters a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.routing.adaptive import AdaptiveRouter, mix_scales
from acmoe.routing.router import Router
from acmoe.routing.state import Routing, RoutingState


class Seen(NamedTuple):
    """One layer in one forward pass, on the CPU in float32; padding is still among the tokens."""

    layer: MoE | SoftMoE
    input: Tensor  # (T, D) what came to the router
    scaled: Tensor  # (T, D) what it read
    scale: Tensor  # (T, D) diagonal of each token's M
    routing: Routing  # before an expert's capacity drops anything
    cluster: Tensor  # (T,) first choice at the MoE layer before, -1: none

    def only(self, index: Tensor) -> Seen:
        """Some of the tokens."""
        kept = {name: getattr(self.routing, name)[index] for name in self.routing._fields[:3]}
        return Seen(
            self.layer,
            self.input[index],
            self.scaled[index],
            self.scale[index],
            self.routing._replace(**kept),
            self.cluster[index],
        )


@contextmanager
def observed(layers: Sequence[MoE | SoftMoE]) -> Iterator[list[Seen]]:
    """What the layers see inside `with`, in the order of their calls.

    A layer calls its router's methods, so the hook sits where the emitter is handed the router's
    input and decision, and asks the router for the rescaled tokens once more. Routers that draw M
    at random draw it again from the generators as they were when the layer was entered; the
    generators themselves go on as if nobody had asked.
    """
    seen: list[Seen] = []
    handles = []
    for layer in layers:
        before: list[tuple[Tensor, ...]] = []
        handles += [
            layer.register_forward_pre_hook(_note_generators(before)),
            layer.emitter.register_forward_pre_hook(_note(layer, before, seen), with_kwargs=True),
        ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _note_generators(
    before: list[tuple[Tensor, ...]],
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        before[:] = [_generators(arguments[0].device)]

    return note


def _note(
    layer: MoE | SoftMoE, before: list[tuple[Tensor, ...]], seen: list[Seen]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    @torch.no_grad()
    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, routing, state = arguments
        assert isinstance(state, RoutingState)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            _set_generators(x.device, before[0])
            scaled = layer.router.rescale(x, state, token_mask=named["token_mask"])
            _set_generators(x.device, before[0])
            scale = scale_read(layer.router, x, state, named["token_mask"])
        seen.append(
            Seen(
                layer,
                _kept(x).flatten(0, -2),
                _kept(scaled).flatten(0, -2),
                _kept(scale).flatten(0, -2),
                Routing(*(_kept(value) for value in routing[:4])),
                _kept(state.assignment[:, 0]),
            )
        )

    return note


def scale_read(router: Router, x: Tensor, state: RoutingState, token_mask: Tensor | None) -> Tensor:
    """The diagonal of each token's M, shaped like x: what `rescale` multiplies by, before remedies.

    A router without statistics of its own (plain, random) multiplies ones as it does x.
    """
    if not isinstance(router, AdaptiveRouter):
        return router.rescale(torch.ones_like(x), state, token_mask=token_mask)
    x_BLD = x if x.dim() == 3 else x[None]
    mask_BL = None if token_mask is None else token_mask.view(x_BLD.shape[:-1])
    scale_BLJD = router.cluster_scales(x_BLD, state, mask_BL, None)
    return mix_scales(scale_BLJD, state.membership.view(scale_BLJD.shape[:-1])).view(x.shape)


def _kept(value: Tensor) -> Tensor:
    """A copy on the CPU: the model may go on to overwrite its own."""
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else None, copy=True)


def _generators(device: torch.device) -> tuple[Tensor, ...]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states)


def _set_generators(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
