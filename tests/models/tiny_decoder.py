"""A language model of some hundred weights, and random tokens for it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RouterConfig
from acmoe.config.text.language import LANGUAGE_MODELS, LanguageConfig, language_router
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.statistics.step import fold_statistics

VOCAB = 23
CAUSAL: dict[str, str | RouterConfig] = {
    "smoe": "smoe",
    "cosine": "cosine",
    "running": AdaptiveConfig(statistics="running"),
    "prefix": AdaptiveConfig(statistics="prefix"),
}
MODERN = {"norm": "pre", "position": "rope"}


def config(router: str | RouterConfig = "smoe", **changes: Any) -> LanguageConfig:
    small = dataclasses.replace(
        LANGUAGE_MODELS["glam-nano"].config,
        **{
            **{"vocab_size": VOCAB, "dim": 8, "heads": 2, "hidden": 8, "num_experts": 4},
            **{"repeats": 2, "span": 6, "block": 6, **changes},
        },
    )
    return dataclasses.replace(small, router=language_router(router, small))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def trained(router: str | RouterConfig = "smoe", **changes: Any) -> LanguageModel:
    """In float64, with running statistics that two batches have moved off their start."""
    torch.manual_seed(0)
    model = LanguageModel(config(router, **changes)).double()
    for seed in (100, 101):
        model(draw(seed, 4, 12))
        fold_statistics(model)
    return model.eval()
