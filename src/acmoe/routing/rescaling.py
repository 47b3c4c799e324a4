"""The base class of routers that rescale the tokens and let another router choose experts."""

from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RandomConfig
from acmoe.ops.route import ScaledTokens
from acmoe.routing.router import Router
from acmoe.routing.state import Routing, check_mix


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
