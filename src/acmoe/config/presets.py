"""Presets of the adaptive router, as fields of `AdaptiveConfig`: the paper's settings, and those of
its published code."""

from typing import Any

from acmoe.config.base_routers import SMoEConfig, SoftConfig

_PUBLISHED: dict[str, Any] = {
    "statistics": "batch",
    "statistics_of": "current",
    "floor": 0.0,
    "min_tokens": 0,
    "mean_over": "chosen",
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"statistics": "batch", "statistics_of": "previous"},
    "reference-lm": _PUBLISHED
    | {
        "base": SMoEConfig(
            normalize_embeddings=True,
            embedding_length=1.5,
            init="orthogonal",
            gate="selected",
            balance_temperature=0.3,
        ),
        "normalize": "feature",
        "eps": 1e-4,
        "clamp": 10.0,
    },
    "reference-swin": _PUBLISHED
    | {
        "base": SMoEConfig(gate="all", noise=1.0),
        "normalize": "global",
        "eps": 1e-4,
        "clamp": 1.5,
        "mean_before_clamp": True,
        "scale_experts": True,
    },
    "reference-soft": _PUBLISHED
    | {
        "base": SoftConfig(),
        "normalize": "global",
        "eps": 0.35,
        "clamp": 5.0,
        "mix": 8,
        "scale_experts": True,
    },
}
