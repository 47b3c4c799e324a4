"""A router that rescales tokens calls its base router as a module: hooks on the base act."""

import copy

import pytest
import torch
from torch import nn

from acmoe import AdaptiveConfig, MoE, RandomConfig, UserError

CONFIGS = [AdaptiveConfig(statistics="batch"), RandomConfig()]


def outputs(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)  # of the random scale
    state = None
    for layer in layers:
        y, state = layer(x, state)
        x = x + y
    return x


@pytest.mark.parametrize("config", CONFIGS, ids=["adaptive", "random"])
def test_weights_that_a_hook_loads_for_the_call_are_used(config: AdaptiveConfig) -> None:
    torch.manual_seed(0)
    sizes = {"dim": 4, "hidden": 8, "num_experts": 3, "top_k": 2}
    layers = nn.ModuleList(MoE(**sizes, router=config) for _ in range(2)).eval()
    x = torch.randn(6, 4)
    wanted = outputs(copy.deepcopy(layers), x)
    for layer in layers:
        base = layer.router.base
        stored = base.embedding
        base.embedding = nn.Parameter(stored.to("meta"))
        with pytest.raises(UserError, match=r"x is on cpu and the router's weight on meta; move"):
            layer(x)

        def load(module: nn.Module, args: object, stored: nn.Parameter = stored) -> None:
            module.embedding = stored

        def unload(module: nn.Module, args: object, output: object) -> None:
            module.embedding = nn.Parameter(module.embedding.to("meta"))

        base.register_forward_pre_hook(load)
        base.register_forward_hook(unload)
    assert torch.equal(outputs(layers, x), wanted)
