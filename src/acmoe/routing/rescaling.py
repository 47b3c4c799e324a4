"""The base class of routers that rescale the tokens and let another router choose experts.

Such a router needs the state of the layer before; where no call gets one, `count_state` warns.
"""

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, LossConfig, RandomConfig
from acmoe.ops.exporting import exporting
from acmoe.ops.route import ScaledTokens
from acmoe.routing.counted_states import Calls, count_call
from acmoe.routing.router import Router, unwrapped
from acmoe.routing.state import Routing, RoutingState, check_mix


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

    def count_alone(self, state: RoutingState | None) -> None:
        count_state(self, state)

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


def count_state(router: Router, state: RoutingState | None) -> None:
    """Count a training call of an adaptive layer; a warning says if calls never get a state."""
    if not router.training or not isinstance(router, RescalingRouter):
        return
    if not torch.compiler.is_compiling():
        if not Calls.passed:  # else there is nothing left to count
            count_call(state is not None, False)
    elif not exporting():  # an exporter's call is not part of a training
        count_call(state is not None, True)
