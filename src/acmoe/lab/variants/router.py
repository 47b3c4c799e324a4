"""Two other ways to rescale a token: the options `center` and `match` of `VariantConfig`.

center   Route by M (h - mu) + mu, where mu is the mean of the token's cluster. M h also moves the
         mean of the cluster, by (M - I) mu: this adds (M - I) mu . e_k to the affinities of all its
         tokens, a bias that depends on the cluster and not on the token. With `center` only
         differences within the cluster are stretched.
match    Route by M h / tau, where tau^2 is the mean of Var_k((M h) . e_k) over the mean of
         Var_k(h . e_k), both over the tokens of a cluster. The variance is over experts, for each
         token, because a softmax over experts ignores what all affinities of a token share. Their
         spread is a temperature, which M of mean one changes and tau restores. There is one tau per
         cluster: it keeps the order of its tokens' inner products and is 1 for M = I. The biases of
         the experts are not rescaled.

Means and variances are those of the call (statistics="batch") or running averages over optimizer
steps (any other mode), so that they are as causal as the scale. A gradient flows through those of
the call under detach=False, and through no others.

T tokens, D features, E experts, C clusters, J clusters per token; B sequences of L tokens.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.config.routing import SMoEConfig
from acmoe.errors import check
from acmoe.lab.variants.config import VariantConfig
from acmoe.lab.variants.distance import DistanceRouter
from acmoe.ops.route import ScaledTokens
from acmoe.ops.statistics.cluster_mean import cluster_mean
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.pending import record_batch
from acmoe.ops.statistics.running import update_average
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.build import new_router
from acmoe.routing.router import Router, flat, flat_mask
from acmoe.routing.state import RoutingState, check_state
from acmoe.routing.statistics.cache import StatisticsSlot
from acmoe.routing.statistics.step import StepStatistics
from acmoe.routing.token_scale import gather_scale, mix_scales, token_scale
from acmoe.routing.topk import TopKRouter


class ClusterAverage(StepStatistics):
    """Per-cluster means (C, X): of the call in batch mode, running averages in other modes."""

    pending_names = ("last", "last_count")
    config: VariantConfig
    average: Tensor
    weight: Tensor
    last: Tensor
    last_count: Tensor

    def __init__(self, config: VariantConfig, *, num_clusters: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("average", torch.zeros(num_clusters, width))
        self.register_buffer("weight", torch.zeros(num_clusters))  # discounted token count
        # The means of the training forwards since the last update; not part of a checkpoint.
        self.register_buffer("last", torch.zeros(num_clusters, width), persistent=False)
        self.register_buffer("last_count", torch.zeros(num_clusters), persistent=False)

    @property
    def of_call(self) -> bool:
        """Return True if the means are those of the call."""
        return self.config.modes.when(training=self.training) == "batch"

    def forward(
        self,
        value: Callable[[], Tensor],
        assignment_T: Tensor,
        mask_T: Tensor | None,
        slot: StatisticsSlot | None,
        name: str,
    ) -> Tensor:
        """Return the (C, X) means of `value()` (T, X), which is called only if it is needed.

        While decoding, a call's means are those of its prefill, stored in the slot by `name`.
        """
        if slot is not None and name in slot.extra:
            return slot.extra[name]
        if not self.of_call and not self.training:
            return self.average
        mean_CX, count_C = cluster_mean(value(), assignment_T, len(self.weight), mask_T)
        if self.training:
            pending = self.pending_buffer("last"), self.pending_buffer("last_count")
            record_batch(*pending, mean_CX, count_C)
            self.count_forward()
        if self.of_call and slot is not None:
            slot.extra[name] = mean_CX
        return mean_CX if self.of_call else self.average

    def update(self) -> None:
        """Update the average with the recorded means."""
        update_average(self.average, self.weight, self.last, self.last_count, self.config.momentum)


class VariantRouter(AdaptiveRouter):
    """An `AdaptiveRouter` with the options `center` and `match`."""

    config: VariantConfig

    def __init__(self, config: VariantConfig, base: Router) -> None:
        check(
            not config.match or isinstance(base, TopKRouter),
            f"match=True around a {type(base).__name__}; it needs the inner products of a "
            "TopKRouter",
        )
        check(
            config.distance == isinstance(base, DistanceRouter),
            f"distance={config.distance} around a {type(base).__name__}; build the router with "
            "acmoe.build_router",
        )
        super().__init__(config, base)
        clusters = base.num_experts
        self.means: ClusterAverage | None = None
        if config.center:
            self.means = ClusterAverage(config, num_clusters=clusters, width=base.dim)
        self.variances: ClusterAverage | None = None  # over experts: without M, and with M
        if config.match:
            self.variances = ClusterAverage(config, num_clusters=clusters, width=2)
        self.register_load_state_dict_pre_hook(_rename_remedies)  # type: ignore[no-untyped-call]

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> ScaledTokens:
        """Return M h / tau, or with `center` (M (h - mu) + mu) / tau, for every token."""
        check_state(state, x, self.mix, self.num_experts, self.config)
        x_BLD = x if x.dim() == 3 else x[None]
        mask_BL = None if token_mask is None else token_mask.view(x_BLD.shape[:-1])
        mask_T = flat_mask(token_mask)
        scale = self.cluster_scale(x_BLD, state, mask_BL, cache)
        if scale.dim() == 2 and self.mix == 1 and self.means is None:
            tokens = ScaledTokens(x, scale, state.assignment[:, 0], state.order)
        else:
            scaled = x.to(accumulation_dtype(x.dtype)) * token_scale(scale, state, x)
            if self.means is not None:
                scaled = scaled + self._shift(x, scale, state, mask_T, cache)
            tokens = ScaledTokens(x, product=scaled)
        if self.variances is None:
            return tokens
        return self._matched(tokens, state.assignment[:, 0], mask_T, cache)

    def _shift(
        self,
        x: Tensor,
        scale_CD: Tensor,
        state: RoutingState,
        mask_T: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """Return (I - M) mu of each token's clusters, shaped as x; 0 for a token in no cluster."""
        assert self.means is not None
        with self._through():
            mean_CD = self.means(
                lambda: x.reshape(-1, self.dim), state.assignment[:, 0], mask_T, slot, "mean"
            )
        mean_CD = mean_CD.detach() if self.config.detach else mean_CD  # no_grad keeps tangents
        assignment_1TJ = state.assignment[None]
        shift_1TJD = gather_scale((1 - scale_CD) * mean_CD.to(scale_CD.dtype), assignment_1TJ)
        shift_1TJD = shift_1TJD.masked_fill((assignment_1TJ < 0)[..., None], 0.0)
        return mix_scales(shift_1TJD, state.membership[None]).view(x.shape)

    def _matched(
        self,
        tokens: ScaledTokens,
        first_T: Tensor,
        mask_T: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> ScaledTokens:
        """Divide the tokens by the temperature tau of their cluster."""
        tau_C = self._temperature(tokens, first_T, mask_T, slot)
        if tokens.product is None:
            assert tokens.scale is not None
            return tokens._replace(scale=tokens.scale / tau_C[:, None])
        tau_T = tau_C[first_T.clamp(min=0)].masked_fill(first_T < 0, 1.0)
        return tokens._replace(product=tokens.product / tau_T.view(*tokens.x.shape[:-1], 1))

    def _temperature(
        self,
        tokens: ScaledTokens,
        first_T: Tensor,
        mask_T: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """Return the temperature tau (C,) of each cluster; 1 where a variance is 0."""
        base, average = self.base, self.variances
        assert average is not None and isinstance(base, TopKRouter)

        def variances() -> Tensor:
            inner_2TE = [inner_products(base, flat(each)) for each in (tokens.x, tokens.dense())]
            return torch.stack(inner_2TE).var(-1, correction=0).T

        with self._through():
            mean_C2 = average(variances, first_T, mask_T, slot, "variances")
        mean_C2 = mean_C2.detach() if self.config.detach else mean_C2
        plain_C, stretched_C = mean_C2.unbind(-1)
        known_C = (plain_C > 0) & (stretched_C > 0)
        return torch.where(known_C, stretched_C / torch.where(known_C, plain_C, 1.0), 1.0).sqrt()

    def _through(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which means have a gradient only under detach=False."""
        return torch.no_grad() if self.config.detach else contextlib.nullcontext()

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        slot = super().new_slot(num_sequences, device=device, dtype=dtype)
        needed = self.means is not None or self.variances is not None
        return StatisticsSlot() if slot is None and needed else slot


def inner_products(router: TopKRouter, x_TD: Tensor) -> Tensor:
    """(T, E) affinities without the experts' biases."""
    affinity_TE = router.affinity(x_TD)
    return affinity_TE if router.bias is None else affinity_TE - router.bias.to(x_TD.dtype)


@new_router.register
def _(config: VariantConfig, **options: Any) -> Router:
    if config.distance:
        assert isinstance(config.base, SMoEConfig)
        return VariantRouter(config, DistanceRouter(config.base, **options))
    return VariantRouter(config, new_router(config.base, **options))


def _rename_remedies(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Read the state_dicts of version 0.1, where the averages were in a module `remedies`."""
    old = f"{prefix}remedies."
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[prefix + key.removeprefix(old)] = state_dict.pop(key)
