"""Build a router from a config or its name."""

import logging
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
from acmoe.errors import UserError, check
from acmoe.ops.dispatch import log_once
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.baselines import (
    CosineRouter,
    ExpertChoiceRouter,
    HashRouter,
    RandomRouter,
    StableRouter,
    ThresholdRouter,
)
from acmoe.routing.metric import MetricRouter
from acmoe.routing.next_state import SAME_ROUTER, NextState, resolve_next_router
from acmoe.routing.origin import NextRouter
from acmoe.routing.router import Router, check_losses
from acmoe.routing.soft import SoftRouter
from acmoe.routing.topk import TopKRouter


def build_router(
    router: str | RouterConfig,
    *,
    dim: int,
    num_experts: int,
    top_k: int,
    losses: LossConfig | None = None,
    standalone: bool = False,
    next_router: NextRouter | str | None = SAME_ROUTER,
) -> Router:
    """Return a router for `num_experts` experts and tokens of `dim` features.

    standalone    True: it also computes the state for the next layer (`Router.next_state`), as
                  `acmoe.MoE` does for the router inside it. For experts of your own.
    next_router   with standalone: the config of the next layer's router, as in `acmoe.MoE`
    """
    check_losses(losses)
    check(
        standalone or next_router == SAME_ROUTER,
        f"next_router={next_router!r} needs standalone=True; inside an acmoe.MoE give it to that",
    )
    config = router_config(router)
    built = new_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
    if standalone:
        check(
            not isinstance(getattr(built, "base", built), SoftRouter),
            "standalone=True beside a soft router, which fills slots instead of choosing experts; "
            "use acmoe.SoftMoE",
        )
        following = resolve_next_router(next_router, built)
        built.next_layer = NextState(following, num_clusters=num_experts, dim=dim)
    return built


@singledispatch
def new_router(config: RouterConfig, **options: Any) -> Router:
    """Return the router of a config; options are those of `build_router`.

    A package that defines a config registers its router with `@new_router.register`.
    """
    raise UserError(f"{type(config).__name__} has no router; register one with new_router.register")


@new_router.register
def _(config: AdaptiveConfig, **options: Any) -> Router:
    if not config.detach and config.mix == 1 and config.modes.train == "running":
        log_once(
            "detach=False changes nothing in training with statistics='running': its scale is an "
            "average over past steps, which has no gradient; use statistics='batch'",
            logging.WARNING,
        )
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
