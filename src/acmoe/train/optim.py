"""The optimizer and its schedule."""

import math

import torch
from torch import Tensor, nn

from acmoe.config.train import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Of update `step`, counted from 1: a line from 0 up to lr, then constant or half a cosine.

    The first update uses lr / warmup, the last one of a cosine min_lr.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / (config.steps - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def adam(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Adam over every parameter; without weight decay exactly the paper's.

    Frozen parameters are in it too: a router may be frozen on the way, and a run that resumes
    afterwards must list the same ones.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Moments and step counts by `optimizer/KIND/PARAMETER`."""
    return {
        f"optimizer/{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` took out."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        room, _, rest = key.partition("/")
        if room == "optimizer":
            kind, _, name = rest.partition("/")
            parameter = parameters[name]
            optimizer.state[parameter][kind] = value.to(parameter.device)
