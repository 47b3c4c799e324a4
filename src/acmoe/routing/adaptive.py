"""The adaptive clustering router: the paper in a hundred lines.

Tokens that chose the same expert at the previous MoE layer form a cluster. A cluster is tight along
some features and loose along others; M_k = diag(1/s_1k, ..., 1/s_dk), scaled to mean one, stretches
the tight ones (Definition 1). A token of cluster k* is routed by

    affinity_k = h^T M_k* e_k                                                   (Eqn. 8)

and since k* is the token's own, this is any router at all, fed with the rescaled token M_k* h. The
experts read h itself. With M = I it is bitwise the router it wraps (Remark 1).

How the pieces meet in one layer (experts/moe.py):
    previous layer   s = dispersion of its router inputs by first choice;  M = normalise(1/s)
    state            carries the token's cluster k* and M
    this layer       x -> x * M[k*] -> base router -> experts

T tokens, or B sequences of L tokens; D features, C = E clusters, J clusters per token (Mix-k).
"""

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.cache import StatisticsSlot
from acmoe.routing.remedies import Remedies
from acmoe.routing.router import Router
from acmoe.routing.state import Routing, RoutingState, check_mix, check_state
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.topk import TopKRouter


class AdaptiveRouter(Router):
    """Any base router, in the space stretched by how tightly a token's cluster holds a feature."""

    def __init__(self, config: AdaptiveConfig, base: Router) -> None:
        super().__init__(
            dim=base.dim, num_experts=base.num_experts, top_k=base.top_k, losses=base.losses
        )
        check_mix(config.mix, base.num_experts)
        self.config = config
        self.base = base
        self.mix = config.mix
        self.always_k = base.always_k
        self.scale_experts = config.scale_experts
        # Statistics of the previous layer's tokens are taken there, and arrive as state.scale.
        self.statistics: ClusterStatistics | None = None
        if config.reads == "current":
            self.statistics = ClusterStatistics(config, num_clusters=base.num_experts, dim=base.dim)
        # Beyond the paper: stretching about a cluster's mean, keeping the gate's temperature.
        self.remedies: Remedies | None = None
        if config.center or config.match:
            self.remedies = Remedies(config, base)

    preset = staticmethod(AdaptiveConfig.preset)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        mode = self.config.modes[0 if self.training else 1]
        return self.base.causal and mode in ("running", "prefix")

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> Tensor:
        """M_k* h for every token (Eqn. 8), in float32: bf16 scales flip near-ties of the top-k."""
        check_state(state, x, self.mix, self.num_experts)
        x_BLD = x if x.dim() == 3 else x[None]
        mask_BL = None if token_mask is None else token_mask.view(x_BLD.shape[:-1])
        scale_BLJD = self.cluster_scales(x_BLD, state, mask_BL, cache)
        scale_BLD = mix_scales(scale_BLJD, state.membership.view(scale_BLJD.shape[:-1]))
        scaled_BLD = x_BLD.to(accumulation_dtype(x.dtype)) * scale_BLD
        if self.remedies is not None:
            scaled_BLD = self.remedies(
                x_BLD, scale_BLJD, scaled_BLD, state, self.base, mask_BL, cache
            )
        return scaled_BLD.view(x.shape)

    def cluster_scales(
        self,
        x_BLD: Tensor,
        state: RoutingState,
        mask_BL: Tensor | None,
        cache: StatisticsSlot | None,
    ) -> Tensor:
        """(B, L, J, D): the diagonal of M for each of a token's clusters."""
        assignment_BLJ = state.assignment.view(*x_BLD.shape[:-1], self.mix)
        if self.statistics is None:
            scale_BLJD = gather_scale(state.scale, assignment_BLJ)
        elif self.statistics.mode == "prefix":
            scale_BLJD = self.statistics.prefix_scale(x_BLD, assignment_BLJ, mask_BL, cache)
        else:
            scale = self.statistics.cluster_scale(x_BLD, assignment_BLJ[..., 0], mask_BL, cache)
            scale_BLJD = gather_scale(scale, assignment_BLJ)
        # A token in no cluster yet (first layer, fresh tokens) keeps M = I.
        return scale_BLJD.masked_fill((assignment_BLJ < 0)[..., None], 1.0)

    def route(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> tuple[Routing, Tensor]:
        """With one scale per cluster for all tokens, rescaling and base router are one kernel."""
        base = self.base
        if not (isinstance(base, TopKRouter) and base.fuses(x, self._obstacle(state))):
            return super().route(x, state, token_mask=token_mask, token_ids=token_ids, cache=cache)
        check_state(state, x, self.mix, self.num_experts)
        scale_CD, assignment_T = state.scale, state.assignment[:, 0]
        clusters = state.sorted if token_mask is None else None
        if self.statistics is not None:
            x_BLD = x if x.dim() == 3 else x[None]
            mask_BL = None if token_mask is None else token_mask.view(x_BLD.shape[:-1])
            assignment_BL = assignment_T.view(x_BLD.shape[:-1])
            scale_CD = self.statistics.cluster_scale(x_BLD, assignment_BL, mask_BL, cache, clusters)
        if self.remedies is not None:
            scale_CD = self.remedies.match_scale(x, scale_CD, assignment_T, base, token_mask, cache)
        return base.fused(x, scale_CD, assignment_T, token_mask, clusters)

    def _obstacle(self, state: RoutingState) -> str | None:
        """What keeps this call from that kernel."""
        config, mode = self.config, self.statistics and self.statistics.mode
        learns = config.learn_strength and torch.is_grad_enabled()
        if mode in ("prefix", "sequence") or self.mix > 1 or config.center:
            return "it knows one scale per cluster, the same for all tokens, and no shift"
        if not config.detach or learns or state.scale.requires_grad:
            return "it has no gradient for the scale"
        return "it hands no rescaled tokens to the experts" if self.scale_experts else None

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        return self.base.decide(x, token_mask=token_mask, token_ids=token_ids)

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        slot = None
        if self.statistics is not None:
            slot = self.statistics.new_slot(num_sequences, device=device, dtype=dtype)
        return slot or (None if self.remedies is None else StatisticsSlot())


def gather_scale(scale: Tensor, assignment_BLJ: Tensor) -> Tensor:
    """(B, L, J, D) scales of each token's clusters, from (C, D) or (B, C, D)."""
    own_BLJ = assignment_BLJ.clamp(min=0)
    if scale.dim() == 2:
        return scale[own_BLJ]
    B, L, J = own_BLJ.shape
    index_BN1 = own_BLJ.view(B, L * J, 1).expand(-1, -1, scale.shape[-1])
    return scale.gather(1, index_BN1).view(B, L, J, scale.shape[-1])


def mix_scales(scale_BLJD: Tensor, membership_BLJ: Tensor) -> Tensor:
    """M = sum_j alpha_j M_j: the token's clusters weighted by its affinities (Mix-k)."""
    if scale_BLJD.shape[2] == 1:
        return scale_BLJD[:, :, 0]
    return (scale_BLJD * membership_BLJ[..., None].to(scale_BLJD.dtype)).sum(2)
