"""A router whose experts each measure a token's distance in a metric of their own.

The paper rescales a token by the metric of the cluster it came from: tokens of one cluster are then
compared with all experts in one metric, and repeat their previous choice (docs/theory.md). Here
each expert k has the mean and variance of the tokens that chose it, and its affinity contains the
log density of that Gaussian:

    affinity_k = x . e_k + b_k - c/2 * mean over d of [(x_d - mu_kd)^2 / v_kd + log v_kd]

c is learned, one scalar per layer; c = 0 is the plain router. The statistics are running averages,
updated once per optimizer step: a token does not depend on others of its batch, and no state passes
between layers or decode steps. The square is expanded, so that the distance is two GEMMs.

T tokens, D features, E experts.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, MetricConfig
from acmoe.ops.route import Route, ScaledTokens
from acmoe.ops.route.reference import choose
from acmoe.ops.statistics.cluster_mean import cluster_mean
from acmoe.ops.statistics.pending import record_batch
from acmoe.ops.statistics.running import update_average
from acmoe.routing.router import flat
from acmoe.routing.state import Routing
from acmoe.routing.step import StepStatistics
from acmoe.routing.topk import TopKRouter, over_selected


class ExpertMoments(StepStatistics):
    """Running means of x and x^2 over the tokens whose first choice was each expert."""

    moments: Tensor  # (E, 2 D): means of x, then means of x^2
    weight: Tensor  # (E,) number of tokens in the means, discounted by momentum
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
        record_batch(self.last_moments, self.last_count, moments_EX, count_E)
        self.count_forward()

    def update(self) -> None:
        update_average(
            self.moments, self.weight, self.last_moments, self.last_count, self.config.momentum
        )

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance (E, D), shrunk towards those of all tokens.

        The moments of all tokens count as `prior_tokens` tokens of each expert; an expert that was
        never chosen has exactly these. Before the first update, mean is 0 and variance 1.
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
    """The top-k router with each expert's log density added to its affinity."""

    config: MetricConfig

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

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.strength, self.config.strength)

    def affinity(self, x_TD: Tensor) -> Tensor:
        return super().affinity(x_TD) - 0.5 * self.strength * self.distance(x_TD)

    def choose(
        self,
        tokens: ScaledTokens,
        *,
        noise_TE: Tensor | None,
        mask_T: Tensor | None,
        temperature: float | None,
    ) -> Route:
        found = choose(
            self.affinity(flat(tokens.dense())),
            top_k=self.top_k,
            over_selected=over_selected(self.config.gate, self.top_k),
            token_mask=mask_T,
            temperature=temperature,
            noise=noise_TE,
        )
        return found._replace(x=tokens.x)

    def distance(self, x_TD: Tensor) -> Tensor:
        """Return (T, E): the mean over features of (x - mu)^2 / v + log v."""
        mean_ED, variance_ED = (
            moment.to(x_TD.dtype) for moment in self.statistics.mean_and_variance()
        )
        inverse_ED = variance_ED.reciprocal()
        offset_E = (mean_ED.square() * inverse_ED + variance_ED.log()).sum(-1)
        cross_TE = x_TD @ (mean_ED * inverse_ED).T
        return (x_TD.square() @ inverse_ED.T - 2 * cross_TE + offset_E) / self.dim

    def route(
        self,
        tokens: ScaledTokens,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Routing:
        routing = super().route(tokens, token_mask=token_mask, token_ids=token_ids)
        if self.training:
            mask_T = None if token_mask is None else token_mask.reshape(-1)
            x_TD = flat(tokens.dense()).detach()
            self.statistics.note(x_TD, routing.affinity.argmax(-1), mask_T)
        return routing
