"""Two variants of what M does to a token: `center` and `match` of `AdaptiveConfig`.

center   M (h - mu) + mu, mu the mean of the token's cluster. M h also moves the cluster: (M - I) mu
         is the same for all its tokens and adds (M - I) mu . e_k to every affinity, a bias that
         says which expert the cluster prefers and nothing of where a token lies in it. About mu
         only differences within the cluster are stretched.
match    M h / tau, tau^2 = mean of Var_k((M h) . e_k) over mean of Var_k(h . e_k), tokens of one
         cluster. A softmax over experts does not see what all affinities of a token share, so the
         variance is over experts, token by token; what it does see is their spread, a temperature,
         which mean-one weights do not hold constant. One tau a cluster: the order of its tokens'
         inner products stays, a cluster with M = I keeps tau = 1, and an expert's bias, which M
         does not touch, stays as it is.

Both take what they need of the call (statistics="batch") or of an average over past optimizer steps
(any other), so that they are as causal as the scale; and both are constants to the gradient, but
for a mean under detach=False.

T tokens, D features, E experts, C clusters, J clusters per token; B sequences of L tokens.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.ops.statistics.cluster_mean import cluster_mean
from acmoe.ops.statistics.running import fold_average
from acmoe.routing.cache import StatisticsSlot
from acmoe.routing.router import Router, flat
from acmoe.routing.state import RoutingState
from acmoe.routing.step import StepStatistics
from acmoe.routing.topk import TopKRouter


class ClusterAverage(StepStatistics):
    """Per-cluster means (C, X), of the call or of past steps, as the statistics mode says."""

    average: Tensor
    weight: Tensor
    last: Tensor
    last_count: Tensor

    def __init__(self, config: AdaptiveConfig, *, num_clusters: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("average", torch.zeros(num_clusters, width))
        self.register_buffer("weight", torch.zeros(num_clusters))  # tokens behind the average
        # What the latest training forward saw; not part of a checkpoint.
        self.register_buffer("last", torch.zeros(num_clusters, width), persistent=False)
        self.register_buffer("last_count", torch.zeros(num_clusters), persistent=False)

    @property
    def of_call(self) -> bool:
        return self.config.modes[0 if self.training else 1] == "batch"

    def forward(
        self,
        value: Callable[[], Tensor],
        assignment_T: Tensor,
        mask_T: Tensor | None,
        slot: StatisticsSlot | None,
        name: str,
    ) -> Tensor:
        """(C, X) means of `value()` (T, X), which is worked out only where it is needed.

        While decoding, a call's means are those of its prefill, kept in the slot by `name`.
        """
        if slot is not None and name in slot.kept:
            return slot.kept[name]
        if not self.of_call and not self.training:
            return self.average
        mean_CX, count_C = cluster_mean(value(), assignment_T, len(self.weight), mask_T)
        if self.training:
            with torch.no_grad():
                self.last.copy_(mean_CX)
                self.last_count.copy_(count_C)
        if self.of_call and slot is not None:
            slot.kept[name] = mean_CX
        return mean_CX if self.of_call else self.average

    def fold(self) -> None:
        fold_average(self.average, self.weight, self.last, self.last_count, self.config.momentum)


class Remedies(nn.Module):
    """`center` and `match`, each present where the config asks for it."""

    def __init__(self, config: AdaptiveConfig, base: Router) -> None:
        super().__init__()
        check(
            not config.match or isinstance(base, TopKRouter),
            f"match=True around a {type(base).__name__}; it needs the inner products of a "
            "TopKRouter",
        )
        self.config = config
        clusters = base.num_experts
        self.means: ClusterAverage | None = None
        if config.center:
            self.means = ClusterAverage(config, num_clusters=clusters, width=base.dim)
        self.variances: ClusterAverage | None = None  # over experts: without M, and with it
        if config.match:
            self.variances = ClusterAverage(config, num_clusters=clusters, width=2)

    def forward(
        self,
        x_BLD: Tensor,
        scale_BLJD: Tensor,
        scaled_BLD: Tensor,
        state: RoutingState,
        base: Router,
        mask_BL: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """What becomes of M h, `scaled_BLD`."""
        first_T = state.assignment[:, 0]
        mask_T = None if mask_BL is None else mask_BL.flatten()
        if self.means is not None:
            recording = torch.no_grad() if self.config.detach else contextlib.nullcontext()
            with recording:
                mean_CD = self.means(lambda: x_BLD.flatten(0, 1), first_T, mask_T, slot, "mean")
            # M h lacks (I - M) mu, which is 0 for a token in no cluster: its M is I.
            own_BLJ = state.assignment.view(scale_BLJD.shape[:-1]).clamp(min=0)
            lack_BLJD = (1 - scale_BLJD) * mean_CD.to(scale_BLJD.dtype)[own_BLJ]
            share_BLJ1 = state.membership.view(scale_BLJD.shape[:-1])[..., None]
            scaled_BLD = scaled_BLD + (share_BLJ1 * lack_BLJD).sum(2)
        if self.variances is not None:
            tau_C = self.temperature(x_BLD, lambda: scaled_BLD, first_T, base, mask_T, slot)
            scaled_BLD = scaled_BLD / by_cluster(tau_C, first_T).view(*x_BLD.shape[:-1], 1)
        return scaled_BLD

    def match_scale(
        self,
        x: Tensor,
        scale_CD: Tensor,
        assignment_T: Tensor,
        base: Router,
        token_mask: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """M / tau of every cluster, for a router that reads no more than a scale."""

        def stretched() -> Tensor:
            return flat(x) * by_cluster(scale_CD, assignment_T)

        mask_T = None if token_mask is None else token_mask.reshape(-1)
        tau_C = self.temperature(x, stretched, assignment_T, base, mask_T, slot)
        return scale_CD / tau_C[:, None]

    @torch.no_grad()
    def temperature(
        self,
        x: Tensor,
        stretched: Callable[[], Tensor],
        assignment_T: Tensor,
        base: Router,
        mask_T: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """(C,) tau of each cluster's tokens x, which M makes `stretched()`."""
        assert self.variances is not None and isinstance(base, TopKRouter)

        def variances() -> Tensor:
            inner_2TE = [base.inner_products(flat(tokens)) for tokens in (x, stretched())]
            return torch.stack(inner_2TE).var(-1, correction=0).T

        both_C2 = self.variances(variances, assignment_T, mask_T, slot, "variances")
        plain_C, stretched_C = both_C2.unbind(-1)
        known_C = (plain_C > 0) & (stretched_C > 0)
        return torch.where(known_C, stretched_C / torch.where(known_C, plain_C, 1.0), 1.0).sqrt()


def by_cluster(value_CX: Tensor, assignment_T: Tensor) -> Tensor:
    """(T, X) the values of each token's cluster; ones for a token in none."""
    value_TX = value_CX[assignment_T.clamp(min=0)]
    return value_TX.masked_fill((assignment_T < 0).view(-1, *[1] * (value_CX.dim() - 1)), 1.0)
