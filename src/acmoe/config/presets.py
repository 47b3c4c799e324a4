"""Presets of the adaptive router: the paper's settings, and those of its published code."""

from typing import Literal

from acmoe.config.base_routers import BaseConfig, SMoEConfig, SoftConfig
from acmoe.config.routing import AdaptiveConfig


def _published(
    base: BaseConfig,
    *,
    normalize: Literal["feature", "global"],
    eps: float,
    clamp: float,
    mean_before_clamp: bool = False,
    mix: int = 1,
    scale_experts: bool,
) -> AdaptiveConfig:
    return AdaptiveConfig(
        base=base,
        statistics="batch",
        statistics_of="current",
        normalize=normalize,
        eps=eps,
        clamp=clamp,
        mean_before_clamp=mean_before_clamp,
        floor=0.0,
        min_tokens=0,
        mean_over="chosen",
        mix=mix,
        scale_experts=scale_experts,
    )


PRESETS = {
    "paper": AdaptiveConfig(statistics="batch", statistics_of="previous"),
    "reference-lm": _published(
        SMoEConfig(
            normalize_embeddings=True,
            embedding_length=1.5,
            init="orthogonal",
            gate="selected",
            balance_temperature=0.3,
        ),
        normalize="feature",
        eps=1e-4,
        clamp=10.0,
        scale_experts=False,
    ),
    "reference-swin": _published(
        SMoEConfig(gate="all", noise=1.0),
        normalize="global",
        eps=1e-4,
        clamp=1.5,
        mean_before_clamp=True,
        scale_experts=True,
    ),
    "reference-soft": _published(
        SoftConfig(), normalize="global", eps=0.35, clamp=5.0, mix=8, scale_experts=True
    ),
}
