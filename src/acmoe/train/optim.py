"""The optimizer and its schedule."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn


class Schedule(Protocol):
    """What the learning rate follows from; a run's config, or one counted in updates."""

    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int: ...


def learning_rate(config: Schedule, step: int) -> float:
    """Of update `step`, counted from 1: a line from 0 up to lr, then constant or half a cosine.

    The first update uses lr / warmup, the last one of a cosine min_lr.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / (config.steps - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2


def adam(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decays: Callable[[str, nn.Parameter], bool] = is_matrix,
) -> torch.optim.AdamW:
    """Adam over every parameter; without weight decay exactly the paper's.

    `decays` says of a parameter and its name whether weight decay shrinks it.

    Frozen parameters are in it too: a router may be frozen on the way, and a run that resumes
    afterwards must list the same ones.
    """
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
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
