"""Hooks that record the input and the routing of every MoE layer without changing either.

T tokens, or B sequences of L tokens; D features, J clusters per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.router import Router
from acmoe.routing.state import Routing, RoutingState
from acmoe.routing.statistics.cache import CarriedMoments
from acmoe.routing.token_scale import token_scale
from acmoe.runtime import keeping_rng, rng_states, set_rng_states

RngStates = dict[str, Tensor]  # the CPU generator's and, on a GPU, the device's


class LayerCall(NamedTuple):
    """One call of one layer. Tensors are on the CPU in float32 and still include padding."""

    layer: MoE | SoftMoE
    input: Tensor  # (T, D) input of the router
    scaled: Tensor  # (T, D) the input multiplied by M
    scale: Tensor  # (T, D) diagonal of each token's M
    routing: Routing  # before an expert's capacity drops any token
    cluster: Tensor  # (T,) first expert at the previous MoE layer; -1 if there is none

    def select(self, index: Tensor) -> LayerCall:
        """Return the call restricted to the tokens at `index`."""
        routing = {name: getattr(self.routing, name)[index] for name in self.routing._fields[:3]}
        return LayerCall(
            self.layer,
            self.input[index],
            self.scaled[index],
            self.scale[index],
            self.routing._replace(**routing),
            self.cluster[index],
        )


@contextmanager
def observed(layers: Sequence[MoE | SoftMoE]) -> Iterator[list[LayerCall]]:
    """Record the calls of `layers` inside the `with` block, in their order.

    The hook is on `layer.next_state`, which receives the router's input and its routing. The hook
    computes the scaled tokens a second time. Routers that draw M at random draw the same M again,
    because the hook restores the generators' states at the layer's entry, and afterwards puts them
    back.
    """
    calls: list[LayerCall] = []
    handles = []
    for layer in layers:
        observer = _Observer(layer, calls)
        entry = layer if isinstance(layer, SoftMoE) else layer.router
        handles += [
            entry.register_forward_pre_hook(observer.enter, with_kwargs=True),
            layer.next_state.register_forward_pre_hook(observer.record, with_kwargs=True),
        ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class _Observer:
    """The hooks of one layer: `enter` keeps what `record` needs to compute M h once more."""

    def __init__(self, layer: MoE | SoftMoE, calls: list[LayerCall]) -> None:
        self.layer, self.calls = layer, calls
        self.rng: RngStates = {}  # the generators' states at the layer's entry
        self.carried: CarriedMoments | None = None

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get("cache")
        self.carried = cache if isinstance(cache, CarriedMoments) else None
        self.rng = rng_states(arguments[0].device)

    @torch.no_grad()
    def record(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Append the call of `next_state`, which is given (x, routing, state)."""
        x, routing, state = arguments
        assert isinstance(state, RoutingState)
        router, mask = self.layer.router, named["token_mask"]
        with keeping_rng(x.device):
            set_rng_states(self.rng, x.device)
            scaled = router.rescale(x, state, token_mask=mask, cache=self.carried).dense()
            set_rng_states(self.rng, x.device)
            scale = scale_per_token(router, x, state, mask, self.carried)
        self.calls.append(
            LayerCall(
                self.layer,
                _cpu_copy(x).flatten(0, -2),
                _cpu_copy(scaled).flatten(0, -2),
                _cpu_copy(scale).flatten(0, -2),
                Routing(*(_cpu_copy(value) for value in routing[:4])),
                _cpu_copy(state.assignment[:, 0]),
            )
        )


def scale_per_token(
    router: Router,
    x: Tensor,
    state: RoutingState,
    token_mask: Tensor | None,
    carried: CarriedMoments | None = None,
) -> Tensor:
    """Return the diagonal of each token's M, shaped like x.

    It is the factor that `rescale` multiplies x by, before any of the router's optional transforms.
    A router without statistics of its own (plain, random) multiplies a tensor of ones instead.
    """
    if not isinstance(router, AdaptiveRouter):
        return router.rescale(torch.ones_like(x), state, token_mask=token_mask).dense()
    x_BLD = x if x.dim() == 3 else x[None]
    mask_BL = None if token_mask is None else token_mask.view(x_BLD.shape[:-1])
    return token_scale(router.cluster_scale(x_BLD, state, mask_BL, carried), state, x)


def _cpu_copy(value: Tensor) -> Tensor:
    """Copy to the CPU, since the model may overwrite its own tensor later."""
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else None, copy=True)
