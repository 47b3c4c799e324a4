"""A random matrix M in place of the adaptive one, the paper's ablation.

D features, C = E clusters.
"""

import torch
from torch import Tensor

from acmoe.config.routing import RandomConfig
from acmoe.ops.bounded import bounded
from acmoe.ops.route import ScaledTokens
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.rescaling import RescalingRouter
from acmoe.routing.router import Router
from acmoe.routing.state import RoutingState, check_state
from acmoe.routing.statistics.cache import StatisticsSlot
from acmoe.routing.token_scale import token_scale


class RandomRouter(RescalingRouter):
    """The paper's ablation: M (C, D) is drawn at random in every call."""

    config: RandomConfig

    def __init__(self, config: RandomConfig, base: Router) -> None:
        super().__init__(config, base)
        self.causal = base.causal

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
        dtype = accumulation_dtype(x.dtype)
        normal_CD = torch.randn(self.num_experts, self.dim, device=x.device, dtype=dtype)
        scale_CD = (1 + self.config.std * normal_CD).clamp(min=0)
        if self.mix == 1:
            return ScaledTokens(x, scale_CD, state.assignment[:, 0], state.order)
        scaled = bounded(x.to(dtype)) * token_scale(scale_CD, state, x)
        return ScaledTokens(x, product=scaled)
