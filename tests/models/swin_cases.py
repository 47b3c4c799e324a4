"""Small Swin models, and what their MoE layers are handed."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.config.images.presets import SWIN_MODELS, vision_router
from acmoe.config.images.vision import SwinConfig
from acmoe.config.routing import RouterConfig, SMoEConfig
from acmoe.models.images.swin import SwinModel
from acmoe.routing.state import RoutingState
from acmoe.routing.statistics.step import fold_statistics

QUIET = SMoEConfig(gate="all")


def config(router: str | RouterConfig = "smoe", **changes: Any) -> SwinConfig:
    """Maps of 8, 4 and 2 a side; the second stage has three MoE layers, two of them adaptive."""
    small = dataclasses.replace(
        SWIN_MODELS["swin-nano"].config,
        **{
            **{"image_size": 16, "patch": 2, "dim": 8, "heads": (2, 2, 4), "num_experts": 4},
            **{"init_std": 0.2, **changes},
        },
    )
    return dataclasses.replace(small, router=vision_router(router, small))


def draw(seed: int, batch: int = 3, side: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, side, side, generator=generator, dtype=torch.float64)


def classes(seed: int, batch: int = 3) -> Tensor:
    return torch.randint(10, (batch,), generator=torch.Generator().manual_seed(seed))


def trained(router: str | RouterConfig = "smoe", **changes: Any) -> SwinModel:
    """In float64, with running statistics that two batches have moved off their start."""
    torch.manual_seed(0)
    model = SwinModel(config(router, **changes)).double()
    for seed in (100, 101):
        model(draw(seed))
        fold_statistics(model)
    return model.eval()


@contextmanager
def layer_calls(model: SwinModel) -> Iterator[list[tuple[Tensor, RoutingState, Tensor]]]:
    """(x, state, y) of each MoE layer, in order."""
    found: list[tuple[Tensor, RoutingState, Tensor]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((inputs[0], inputs[1], output[0]))

    handles = [layer.register_forward_hook(note) for layer in model.moe_layers()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
