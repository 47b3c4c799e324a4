"""A router whose experts each measure a token's distance in a metric of their own.

The paper rescales a token by the metric of the cluster it came from: tokens of one cluster are then
compared with all experts in one metric, and repeat their previous choice (docs/theory.md). Here
each expert k has the mean and variance of the tokens that chose it, and its affinity contains the
log density of that Gaussian:

    affinity_k = x . e_k + b_k - c/2 * mean over d of [(x_d - mu_kd)^2 / v_kd + log v_kd]

c is learned, one scalar per layer; c = 0 is the plain router. The statistics are running averages,
updated once per optimizer step: a token does not depend on others of its batch, and no state passes
between layers or decode steps. The square is expanded, so that the distance is two GEMMs.

Means, variances and distances are computed from x - o, where the origin o (D,) is near the mean of
all tokens. Computed from x itself, variances would be differences of large squares: tokens about
300 with a spread of 0.1 have x^2 near 90,000, where float32 numbers lie 0.008 apart, and a variance
of 0.01.

T tokens, D features, E experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, MetricConfig
from acmoe.ops.bounded import bounded
from acmoe.ops.route import Route, ScaledTokens
from acmoe.ops.route.reference import choose
from acmoe.ops.statistics.cluster_mean import cluster_mean
from acmoe.ops.statistics.over_ranks import world_size
from acmoe.ops.statistics.pending import record_batch, write
from acmoe.ops.statistics.running import update_average
from acmoe.routing.router import flat, flat_mask
from acmoe.routing.state import Routing, first_choice
from acmoe.routing.statistics.step import StepStatistics
from acmoe.routing.topk import TopKRouter, over_selected


class ExpertMoments(StepStatistics):
    """Running means of x - o and (x - o)^2 over the tokens whose first choice was each expert.

    The micro-batches of an optimizer step add up first. An expert with a single token in a whole
    step keeps its moments, as clusters keep their dispersion (`update_average`), and that token is
    dropped: with one token in every step it has the moments of all tokens for ever. Only layers
    with about as few tokens as experts have such experts, and larger steps are the remedy.

    The origin o is the mean of the first batch's tokens; each `update` moves it to the mean of all
    experts' tokens, so that it follows them.
    """

    pending_names = ("last_moments", "last_count")
    moments: Tensor  # (E, 2 D): means of x - o, then means of (x - o)^2
    origin: Tensor  # (D,) o; zeros before the first batch, and in checkpoints of version 0.1
    weight: Tensor  # (E,) number of tokens in the means, discounted by momentum
    last_moments: Tensor
    last_count: Tensor

    def __init__(self, config: MetricConfig, *, num_experts: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("moments", torch.zeros(num_experts, 2 * dim))
        self.register_buffer("origin", torch.zeros(dim))
        self.register_buffer("weight", torch.zeros(num_experts))
        self.register_buffer("last_moments", torch.zeros(num_experts, 2 * dim), persistent=False)
        self.register_buffer("last_count", torch.zeros(num_experts), persistent=False)
        self.register_load_state_dict_pre_hook(_without_origin)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def record(self, x_TD: Tensor, first_T: Tensor, token_mask_T: Tensor | None) -> None:
        self._begin(x_TD, first_T, token_mask_T)
        shifted_TD = x_TD - self.origin.to(x_TD.dtype)
        both_TX = torch.cat([shifted_TD, shifted_TD.square()], dim=-1)
        moments_EX, count_E = cluster_mean(both_TX, first_T, len(self.weight), token_mask_T)
        pending = self.pending_buffer("last_moments"), self.pending_buffer("last_count")
        record_batch(*pending, moments_EX, count_E)
        self.count_forward()

    def _begin(self, x_TD: Tensor, first_T: Tensor, token_mask_T: Tensor | None) -> None:
        """Put the origin at the mean of the first batch's tokens.

        Processes that pool their moments keep it at 0 until their first update: they need the same
        origin, and each has tokens of its own.
        """
        if world_size() > 1:
            return
        mean_1D, _ = cluster_mean(x_TD, torch.zeros_like(first_T), 1, token_mask_T)
        unset = (self.weight.sum() == 0) & (self.origin == 0).all()
        origin_D = torch.where(unset, mean_1D[0].to(self.origin.dtype), self.origin)
        write(self.origin.copy_, origin_D)

    @torch.no_grad()
    def update(self) -> None:
        recorded = (self.last_count > 0).any()
        update_average(
            self.moments, self.weight, self.last_moments, self.last_count, self.config.momentum
        )
        self._recentre(recorded)

    def _recentre(self, recorded: Tensor) -> None:
        """Move the origin to the mean of all experts' tokens, if a batch was recorded.

        With step d a mean m becomes m - d, and a mean square q becomes q - 2 d m + d^2, here
        q - m^2 + (m - d)^2. Experts without a token keep moments of 0.
        """
        step_D = self._pooled()[: len(self.origin)]
        mean_ED, square_ED = self.moments.chunk(2, dim=-1)
        moved_ED = mean_ED - step_D
        square_ED = square_ED - mean_ED.square() + moved_ED.square()
        moved_EX = torch.cat([moved_ED, square_ED], dim=-1)
        moves_E1 = recorded & (self.weight[:, None] > 0)
        self.moments.copy_(torch.where(moves_E1, moved_EX, self.moments))
        self.origin.add_(torch.where(recorded, step_D, 0.0))

    def _pooled(self) -> Tensor:
        """Return (2 D,): the moments of all experts' tokens; 0 before the first update."""
        weight_E1 = self.weight[:, None]
        return (weight_E1 * self.moments).sum(0) / weight_E1.sum().clamp(min=1e-12)

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance (E, D), shrunk towards those of all tokens.

        The moments of all tokens count as `prior_tokens` tokens of each expert; an expert that was
        never chosen has exactly these. Before the first update, mean is 0 and variance 1.
        """
        shifted_ED, variance_ED = self.shifted_mean_and_variance()
        return self.center() + shifted_ED, variance_ED

    def center(self) -> Tensor:
        """Return the origin (D,) to subtract from tokens; 0 before the first update."""
        return torch.where(self.weight.sum() > 0, self.origin, 0.0)

    def shifted_mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return `mean_and_variance` of the tokens minus `center`."""
        weight_E1 = self.weight[:, None]
        total = weight_E1.sum()
        pooled_X = self._pooled()
        prior = self.config.prior_tokens
        own_EX = (weight_E1 * self.moments + prior * pooled_X) / (weight_E1 + prior)
        (mean_ED, square_ED), (mean_D, square_D) = (m.chunk(2, dim=-1) for m in (own_EX, pooled_X))
        least_D = (self.config.floor * (square_D - mean_D.square())).clamp(min=1e-12)
        variance_ED = torch.maximum(square_ED - mean_ED.square(), least_D)
        return mean_ED, torch.where(total > 0, variance_ED, 1.0)


def _without_origin(
    module: ExpertMoments, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Add the origin 0 to a state_dict of version 0.1, whose moments are of x, not x - origin."""
    if f"{prefix}moments" in state_dict:
        state_dict.setdefault(f"{prefix}origin", torch.zeros_like(module.origin))


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
        # A token far from all experts has distances whose square, in the z-loss, would overflow.
        return bounded(super().affinity(x_TD) - 0.5 * self.strength * self.distance(x_TD))

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
            moment.to(x_TD.dtype) for moment in self.statistics.shifted_mean_and_variance()
        )
        x_TD = x_TD - self.statistics.center().to(x_TD.dtype)
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
            mask_T = flat_mask(token_mask)
            x_TD = flat(tokens.dense()).detach()
            self.statistics.record(x_TD, first_choice(routing), mask_T)
        return routing
