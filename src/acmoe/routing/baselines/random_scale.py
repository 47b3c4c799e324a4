"""A random matrix M in place of the adaptive one, the paper's ablation.

T tokens, D features, C = E clusters, J clusters per token.
"""

import torch
from torch import Tensor

from acmoe.config.routing import RandomConfig
from acmoe.ops.bounded import bounded
from acmoe.ops.route import ScaledTokens
from acmoe.routing.adaptive import gather_scale, mix_scales
from acmoe.routing.router import Router, flat
from acmoe.routing.state import Routing, RoutingState, check_mix, check_state
from acmoe.routing.statistics.cache import StatisticsSlot


class RandomRouter(Router):
    """The paper's ablation: M (C, D) is drawn at random in every call."""

    def __init__(self, config: RandomConfig, base: Router) -> None:
        super().__init__(
            dim=base.dim, num_experts=base.num_experts, top_k=base.top_k, losses=base.losses
        )
        check_mix(config.mix, base.num_experts)
        self.config = config
        self.base = base
        self.mix = config.mix
        self.causal = base.causal
        self.always_k = base.always_k

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> ScaledTokens:
        """Multiply each token by the random scale of its clusters."""
        check_state(state, x, self.mix, self.num_experts, self.config)
        x_TD = flat(x)
        normal_CD = torch.randn(self.num_experts, self.dim, device=x.device, dtype=x_TD.dtype)
        scale_CD = (1 + self.config.std * normal_CD).clamp(min=0)
        if self.mix == 1:
            return ScaledTokens(x, scale_CD, state.assignment[:, 0], state.order)
        scale_TJD = gather_scale(scale_CD, state.assignment[None])
        scale_TJD = scale_TJD.masked_fill((state.assignment < 0)[None, ..., None], 1.0)
        scaled_TD = bounded(x_TD) * mix_scales(scale_TJD, state.membership[None])[0]
        return ScaledTokens(x, product=scaled_TD.view(x.shape))

    def route(
        self,
        tokens: ScaledTokens,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Routing:
        found: Routing = self.base(tokens, token_mask=token_mask, token_ids=token_ids)
        return found
