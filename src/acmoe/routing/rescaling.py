"""The base class of routers that rescale the tokens and let another router choose experts.

Such a router needs the state of the layer before. `y, _ = moe(x)` in every block is no error, but
each layer then is a first one, and routes as its base router; `count_state` warns of it.
"""

import logging
from typing import Any

from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, LossConfig, RandomConfig
from acmoe.ops.dispatch import log_once
from acmoe.ops.route import ScaledTokens
from acmoe.ops.statistics.over_ranks import world_size
from acmoe.routing.router import Router, unwrapped
from acmoe.routing.state import Routing, RoutingState, check_mix

PATIENCE = 100  # training calls without a state before the warning
_FIRST_STAGE = "; all is well if it is the only one in the first stage of a pipeline"


class RescalingRouter(Router):
    """Routes as `base` does, for tokens that a subclass rescales in `rescale`."""

    config: AdaptiveConfig | RandomConfig

    def __init__(self, config: AdaptiveConfig | RandomConfig, base: Router) -> None:
        super().__init__(
            dim=base.dim, num_experts=base.num_experts, top_k=base.top_k, losses=base.losses
        )
        check_mix(config.mix, base.num_experts)
        self.config = config
        self.base = base
        self.mix = config.mix
        self.always_k = base.always_k

    # The base chooses the experts and computes the losses: what is set here is set on it.

    @property
    def top_k(self) -> int:
        """The number of experts per token, that of the base router."""
        return int(unwrapped(self.base).top_k)

    @top_k.setter
    def top_k(self, value: int) -> None:
        if "base" in self._modules:  # it is missing while __init__ runs
            unwrapped(self.base).top_k = value

    @property
    def losses(self) -> LossConfig:
        """The weights of the auxiliary losses, those of the base router."""
        found: LossConfig = unwrapped(self.base).losses
        return found

    @losses.setter
    def losses(self, value: LossConfig) -> None:
        if "base" in self._modules:
            unwrapped(self.base).losses = value

    def forward(
        self, x: Tensor | ScaledTokens, state: RoutingState | None = None, **options: Any
    ) -> Routing:
        if self.next_layer is not None:  # no MoE layer is around it, which would count the state
            count_state(self, state)
        return super().forward(x, state, **options)

    def route(
        self,
        tokens: ScaledTokens,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Routing:
        """Let the base router choose experts for the rescaled tokens."""
        found: Routing = self.base(tokens, token_mask=token_mask, token_ids=token_ids)
        return found


class _Calls:
    """Training calls of layers with such routers in this process."""

    without = 0  # calls that got no state, before the first that got one
    passed = False  # True: a call got a state


def count_state(router: Router, state: RoutingState | None) -> None:
    """Count a training call; warn once if PATIENCE of them came and none got a state."""
    if router.training and isinstance(router, RescalingRouter):
        _count(state is not None)


def _count(passed: bool) -> None:
    if _Calls.passed:
        return
    _Calls.passed = passed
    _Calls.without += not passed
    if _Calls.without >= PATIENCE:
        log_once(
            f"{PATIENCE} training calls of adaptive layers, and none got the state of a layer "
            "before it, so that all of them route as the plain router: pass it on, "
            "y, state = moe(x, state), or let acmoe.MoEStack do so (a single MoE layer has no "
            f"layer before it, and needs no adaptive router{_FIRST_STAGE * (world_size() > 1)})",
            logging.WARNING,
        )


# torch.compile then counts once, while it traces, and leaves the call out of the graph. This is
# torch.compiler.assume_constant_result without its import of Dynamo, which takes a second.
_count._dynamo_marked_constant = True  # type: ignore[attr-defined]
