"""The adaptive clustering router: the paper in about a hundred lines.

Tokens that chose the same expert at the previous MoE layer form a cluster. A cluster is tight along
some features and loose along others; M_k = diag(1/s_1k, ..., 1/s_dk), scaled to mean one, stretches
the tight ones (Definition 1). A token of cluster k* is routed by

    affinity_k = h^T M_k* e_k                                                   (Eqn. 8)

Since k* is the token's own cluster, M_k* is the same for all experts k: any base router that is fed
with the rescaled token M_k* h computes these affinities. The experts read h itself. With M = I the
router is bitwise the one it wraps (Remark 1).

The steps around one layer, which `MoE.forward` (experts/moe.py) puts together:

    previous layer   s, the dispersion of its router inputs by first choice   acmoe.dispersion
                     M = 1/s, scaled to mean one                              acmoe.cluster_scale
    state            carries each token's cluster k*, and M                   RoutingState
    this layer       M_k* h                                                   `rescale`, below
                     affinities, gates and the chosen experts                 TopKRouter.route
                     outputs of the experts, which read h                     ExpertMLP

T tokens, or B sequences of L tokens; D features, C = E clusters, J clusters per token (Mix-k).
"""

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.ops.bounded import bounded
from acmoe.ops.route import ScaledTokens
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.rescaling import RescalingRouter
from acmoe.routing.router import Router
from acmoe.routing.state import RoutingState, check_state
from acmoe.routing.statistics import ClusterStatistics, build_statistics
from acmoe.routing.statistics.cache import StatisticsSlot
from acmoe.routing.token_scale import own_rows, token_scale


class AdaptiveRouter(RescalingRouter):
    """Rescale every token by M of its cluster, then route it by any base router."""

    config: AdaptiveConfig

    def __init__(self, config: AdaptiveConfig, base: Router) -> None:
        super().__init__(config, base)
        self.scale_experts = config.scale_experts
        # Statistics of the previous layer's tokens are taken there, and arrive as state.scale.
        self.statistics: ClusterStatistics | None = None
        if config.reads == "current":
            self.statistics = build_statistics(config, num_clusters=base.num_experts, dim=base.dim)

    preset = staticmethod(AdaptiveConfig.preset)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Return True if a token's choice depends on no later token and no other sequence."""
        mode = self.config.modes.when(training=self.training)
        return self.base.causal and mode in ("running", "prefix")

    @property
    def carries_moments(self) -> bool:  # type: ignore[override]
        """Return True if its statistics of a stream continue from one segment to the next."""
        return self.statistics is not None and self.statistics.mode == "prefix"

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> ScaledTokens:
        """Return M_k* h for every token (Eqn. 8)."""
        check_state(state, x, self.mix, self.num_experts, self.config)
        scale = self.cluster_scale(x, state, token_mask, cache)
        if scale.dim() == 2 and self.mix == 1:  # one M per cluster, the same for all its tokens
            return ScaledTokens(x, scale, state.assignment.view(-1), state.order)
        if not (scale.requires_grad or state.membership.requires_grad):
            return ScaledTokens(x, *own_rows(scale, state, x))
        scaled = bounded(x.to(accumulation_dtype(x.dtype))) * token_scale(scale, state, x)
        return ScaledTokens(x, product=scaled)

    def cluster_scale(
        self,
        x: Tensor,
        state: RoutingState,
        token_mask: Tensor | None,
        cache: StatisticsSlot | None,
    ) -> Tensor:
        """Return the diagonals of M (Definition 1) for tokens (T, D) or (B, L, D).

        (C, D) for all tokens of the call, (B, C, D) for each sequence, or (B, L, J, D) for each
        token and cluster, where a token's M depends on its position (prefix statistics).
        """
        if self.statistics is None:
            return state.scale
        if x.dim() == 2 and self.statistics.mode in ("prefix", "sequence"):  # one sequence
            x, token_mask = x[None], None if token_mask is None else token_mask[None]
        order = state.order if token_mask is None else None
        if self.statistics.mode == "prefix":
            assignment_BLJ = state.assignment.view(*x.shape[:-1], self.mix)
            return self.statistics.prefix_scale(x, assignment_BLJ, token_mask, cache, order=order)
        first = state.assignment[:, 0].view(x.shape[:-1])
        chosen_C = state.scale[:, 0] if self.config.mean_over == "chosen" else None
        return self.statistics.cluster_scale(
            x, first, token_mask, cache, order=order, chosen_C=chosen_C
        )

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        if self.statistics is None:
            return None
        return self.statistics.new_slot(num_sequences, device=device, dtype=dtype)
