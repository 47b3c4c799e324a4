"""Attached tiny models, whose statistics have been measured, for the tests in this folder."""

import copy
import functools
from typing import Any

import torch
from small_models import build, inputs
from torch import Tensor, nn

import acmoe
from acmoe import AdaptiveConfig
from acmoe.hf.parts import attached_parts
from acmoe.routing.statistics import ClusterStatistics

CLOSE = {"atol": 2e-6, "rtol": 0}  # rounding of the experts' GEMMs, in another order


def measured(name: str = "mixtral", **fields: Any) -> nn.Module:
    """A model in evaluation mode, adaptive in all MoE layers but the first, after four batches."""
    return copy.deepcopy(_measured(name, AdaptiveConfig(**{"momentum": 0.5, **fields})))


@functools.cache
def _measured(name: str, config: AdaptiveConfig) -> nn.Module:
    model = acmoe.attach(build(name), config)
    return acmoe.calibrate(model, [inputs(name, 4, 24, seed=100 + s) for s in range(4)])


def logits(model: nn.Module, **arguments: Any) -> Tensor:
    with torch.no_grad():
        output = model(**arguments)
    return output["logits"] if "logits" in output else output["last_hidden_state"]


def statistics(model: nn.Module) -> list[ClusterStatistics]:
    found = [part.statistics for part in attached_parts(model).values()]
    return [one for one in found if one is not None]


def ids(batch: int = 2, length: int = 10, seed: int = 5) -> Tensor:
    return inputs("mixtral", batch, length, seed)["input_ids"]


def left_padded(tokens: Tensor, padding: int) -> dict[str, Tensor]:
    """The same tokens after `padding` masked ones, at the same positions."""
    blank = torch.zeros(len(tokens), padding, dtype=torch.long)
    mask = torch.cat([blank, torch.ones_like(tokens)], 1)
    return {
        "input_ids": torch.cat([blank, tokens], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
