"""Equal first weights for the conditions of a seed.

A router that draws its first weights in another way than the plain one leaves the rest of the model
other draws, and the difference of two first weights would pass for one of routers.
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
    """Give the model all the weights its plain twin begins with, but those of its routers.

    A model whose routers draw as the plain ones do has them already, its routers' too; what only
    this model has, such as a learned strength, is not drawn. Whatever is drawn from here on,
    dropout for one, is also the same for every condition.
    """
    torch.manual_seed(seed)
    twin = build_model(replace(config, router=plain)).state_dict()
    for name, parameter in model.named_parameters():
        if name in twin and "router" not in name.split("."):
            parameter.copy_(twin[name])
    torch.manual_seed(derive_seed(seed, "training"))
