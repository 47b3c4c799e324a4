"""Equal initial weights for all conditions of a seed.

A router that draws other random numbers than the plain router at initialisation changes the random
numbers of all weights after it. A difference between initial weights would then look like a
difference between routers.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from acmoe.config.routing import RouterConfig
from acmoe.data.seeding import derive_seed
from acmoe.models.registry import build_model


@torch.no_grad()
def pair_with_plain(model: nn.Module, config: Any, plain: RouterConfig, seed: int) -> None:
    """Copy into the model all initial weights of the same model with the plain router.

    The weights of the routers themselves are not copied; routers that draw as the plain ones do
    have equal weights anyway. Parameters that only this model has, such as a learned strength, are
    not random. All later random numbers, such as dropout, are also the same for every condition.
    """
    torch.manual_seed(seed)
    twin = build_model(replace(config, router=plain)).state_dict()
    for name, parameter in model.named_parameters():
        if name in twin and "router" not in name.split("."):
            parameter.copy_(twin[name])
    torch.manual_seed(derive_seed(seed, "training"))
