"""A small model to save, and its files."""

from pathlib import Path
from typing import Any

import torch

from acmoe.config.routing import RouterConfig
from acmoe.models.registry import create_model
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.statistics.step import fold_statistics

TOKENS = torch.arange(24).view(2, 12)


def small(router: str | RouterConfig = "adaptive", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"dim": 16, "hidden": 16, "repeats": 2, "num_experts": 4, "span": 8, "block": 8}
    model = create_model("glam-nano", router=router, **{**sizes, **changes})
    assert isinstance(model, LanguageModel)
    model(TOKENS)
    fold_statistics(model)
    return model.eval()


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("weights-*.safetensors")
    return file
