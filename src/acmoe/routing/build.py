"""Build a router from a config or its name."""

from functools import singledispatch
from typing import Any

from acmoe.config.routing import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    MetricConfig,
    RandomConfig,
    RouterConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
    router_config,
)
from acmoe.errors import UserError
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.baselines import CosineRouter, ExpertChoiceRouter, HashRouter, RandomRouter
from acmoe.routing.metric import MetricRouter
from acmoe.routing.router import Router
from acmoe.routing.soft import SoftRouter
from acmoe.routing.stable import StableRouter
from acmoe.routing.threshold import ThresholdRouter
from acmoe.routing.topk import TopKRouter


def build_router(
    router: str | RouterConfig,
    *,
    dim: int,
    num_experts: int,
    top_k: int,
    losses: LossConfig | None = None,
) -> Router:
    """Return a router for `num_experts` experts and tokens of `dim` features."""
    config = router_config(router)
    return new_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)


@singledispatch
def new_router(config: RouterConfig, **options: Any) -> Router:
    """Return the router of a config; options are those of `build_router`.

    A package that defines a config registers its router with `@new_router.register`.
    """
    raise UserError(f"{type(config).__name__} has no router; register one with new_router.register")


@new_router.register
def _(config: AdaptiveConfig, **options: Any) -> Router:
    return AdaptiveRouter(config, new_router(config.base, **options))


@new_router.register
def _(config: RandomConfig, **options: Any) -> Router:
    return RandomRouter(config, new_router(config.base, **options))


@new_router.register
def _(config: StableConfig, **options: Any) -> Router:
    if config.legacy:
        # The published baseline has one stage and unit-length embeddings.
        legacy = SMoEConfig(normalize_embeddings=True, init="orthogonal", gate="selected")
        return TopKRouter(legacy, **options)
    return StableRouter(config, **options)


_ROUTERS: dict[type[RouterConfig], Any] = {
    SMoEConfig: TopKRouter,
    MetricConfig: MetricRouter,
    CosineConfig: CosineRouter,
    ThresholdConfig: ThresholdRouter,
    HashConfig: HashRouter,
    ExpertChoiceConfig: ExpertChoiceRouter,
    SoftConfig: SoftRouter,
}
for _config, _router in _ROUTERS.items():
    new_router.register(_config, _router)
