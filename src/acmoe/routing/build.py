"""From a config, or its name, to a router."""

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
    """A router of `num_experts` experts, for x of `dim` features."""
    config = router_config(router)
    if isinstance(config, AdaptiveConfig | RandomConfig):
        base = build_router(
            config.base, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses
        )
        if isinstance(config, AdaptiveConfig):
            return AdaptiveRouter(config, base)
        return RandomRouter(config, base)
    size = {"dim": dim, "num_experts": num_experts, "top_k": top_k}
    match config:
        case MetricConfig():  # before SMoEConfig, which it extends
            return MetricRouter(config, **size, losses=losses)
        case SMoEConfig():
            return TopKRouter(config, **size, losses=losses)
        case CosineConfig():
            return CosineRouter(config, **size, losses=losses)
        case StableConfig(legacy=True):
            # What the published baseline computes: one stage, unit-length embeddings.
            legacy = SMoEConfig(normalize_embeddings=True, init="orthogonal", gate="selected")
            return TopKRouter(legacy, **size, losses=losses)
        case StableConfig():
            return StableRouter(config, **size, losses=losses)
        case ThresholdConfig():
            return ThresholdRouter(config, **size, losses=losses)
        case HashConfig():
            return HashRouter(config, **size, losses=losses)
        case ExpertChoiceConfig():
            return ExpertChoiceRouter(config, **size, losses=losses)
        case SoftConfig():
            return SoftRouter(config, **size, losses=losses)
