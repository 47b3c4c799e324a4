"""Every expert measures a token in the metric of its own cluster.

The paper stretches a token by the metric of the cluster it came from, whichever expert is asked:
tokens of one cluster are then compared with all experts in one metric, and the choice before is
repeated (docs/theory.md). Here each expert k keeps mean and variance of the tokens that chose it,
and its affinity falls with the token's distance in that metric, the log density of a Gaussian:

    affinity_k = x . e_k + b_k - c/2 * mean over d of [(x_d - mu_kd)^2 / v_kd + log v_kd]

c is learned, one number a layer; c = 0 is the plain router. The statistics are running averages,
folded in once per optimizer step: no token reads another of its batch, and nothing is kept between
layers or decode steps. The square is opened up, so this costs two products instead of one.

T tokens, D features, E experts.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, MetricConfig
from acmoe.ops.statistics.cluster_mean import cluster_mean
from acmoe.ops.statistics.running import fold_average
from acmoe.routing.router import flat
from acmoe.routing.state import Routing
from acmoe.routing.step import StepStatistics
from acmoe.routing.topk import TopKRouter


class ExpertMoments(StepStatistics):
    """Running means of x and x^2 over the tokens whose first choice an expert was."""

    moments: Tensor  # (E, 2 D)
    weight: Tensor  # (E,) tokens behind them, discounted
    last_moments: Tensor
    last_count: Tensor

    def __init__(self, config: MetricConfig, *, num_experts: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("moments", torch.zeros(num_experts, 2 * dim))
        self.register_buffer("weight", torch.zeros(num_experts))
        self.register_buffer("last_moments", torch.zeros(num_experts, 2 * dim), persistent=False)
        self.register_buffer("last_count", torch.zeros(num_experts), persistent=False)

    @torch.no_grad()
    def note(self, x_TD: Tensor, first_T: Tensor, token_mask_T: Tensor | None) -> None:
        both_TX = torch.cat([x_TD, x_TD.square()], dim=-1)
        moments_EX, count_E = cluster_mean(both_TX, first_T, len(self.weight), token_mask_T)
        self.last_moments.copy_(moments_EX)
        self.last_count.copy_(count_E)

    def fold(self) -> None:
        fold_average(
            self.moments, self.weight, self.last_moments, self.last_count, self.config.momentum
        )

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """(E, D) each, drawn towards those of all tokens, which count as `prior_tokens`.

        An expert that was never chosen has those of all tokens; before the first fold mean 0 and
        variance 1, the same for all experts.
        """
        weight_E1 = self.weight[:, None]
        total = weight_E1.sum()
        pooled_X = (weight_E1 * self.moments).sum(0) / total.clamp(min=1e-12)
        prior = self.config.prior_tokens
        own_EX = (weight_E1 * self.moments + prior * pooled_X) / (weight_E1 + prior)
        (mean_ED, square_ED), (mean_D, square_D) = (m.chunk(2, dim=-1) for m in (own_EX, pooled_X))
        least_D = (self.config.floor * (square_D - mean_D.square())).clamp(min=1e-12)
        variance_ED = torch.maximum(square_ED - mean_ED.square(), least_D)
        return mean_ED, torch.where(total > 0, variance_ED, 1.0)


class MetricRouter(TopKRouter):
    """The top-k router plus each expert's own log density."""

    def __init__(
        self,
        config: MetricConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        super().__init__(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.statistics = ExpertMoments(config, num_experts=num_experts, dim=dim)
        self.strength = nn.Parameter(torch.tensor(float(config.strength)))

    def affinity(self, x_TD: Tensor) -> Tensor:
        return super().affinity(x_TD) - 0.5 * self.strength * self.distance(x_TD)

    def distance(self, x_TD: Tensor) -> Tensor:
        """(T, E) mean over features of (x - mu)^2 / v + log v."""
        mean_ED, variance_ED = (
            moment.to(x_TD.dtype) for moment in self.statistics.mean_and_variance()
        )
        inverse_ED = variance_ED.reciprocal()
        offset_E = (mean_ED.square() * inverse_ED + variance_ED.log()).sum(-1)
        cross_TE = x_TD @ (mean_ED * inverse_ED).T
        return (x_TD.square() @ inverse_ED.T - 2 * cross_TE + offset_E) / self.dim

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        routing = super().decide(x, token_mask=token_mask, token_ids=token_ids)
        if self.training:
            mask_T = None if token_mask is None else token_mask.reshape(-1)
            self.statistics.note(flat(x).detach(), routing.affinity.argmax(-1), mask_T)
        return routing

    def fuses(self, x: Tensor, other: str | None = None) -> bool:
        return super().fuses(x, other or "it knows no metric of the experts' own")
