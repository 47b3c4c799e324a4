"""A small language model that generates, and prompts for it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from acmoe.config.routing import RouterConfig
from acmoe.config.text.language import LANGUAGE_MODELS, language_router
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.statistics.step import fold_statistics

VOCAB = 23


def trained(router: str | RouterConfig = "smoe", **changes: Any) -> LanguageModel:
    """In float64, with running statistics that two batches have moved off their start."""
    small = dataclasses.replace(
        LANGUAGE_MODELS["glam-nano"].config,
        **{
            **{"vocab_size": VOCAB, "dim": 8, "heads": 2, "hidden": 8, "num_experts": 4},
            **{"repeats": 2, "span": 6, "block": 6, **changes},
        },
    )
    torch.manual_seed(0)
    made = dataclasses.replace(small, router=language_router(router, small))
    model = LanguageModel(made).double()
    for seed in (100, 101):
        model(draw(seed, 4, 12))
        fold_statistics(model)
    return model.eval()


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))
