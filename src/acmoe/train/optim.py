"""The optimizer and its schedule."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acmoe.errors import check
from acmoe.routing.router import Router

Groups = list[dict[str, Any]]


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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """In place where it is a tensor, which a captured update reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


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
    router_sgd: float | None = None,
) -> torch.optim.AdamW:
    """Adam over every parameter; without weight decay exactly the paper's.

    `decays` says of a parameter and its name whether weight decay shrinks it. `router_sgd` is the
    learning rate, at Adam's `lr`, of plain SGD for the routers' matrices; None: Adam for them, too.

    Frozen parameters are in it too: a router may be frozen on the way, and a run that resumes
    afterwards must list the same ones.
    """
    apart = set() if router_sgd is None else router_matrices(model)
    check(
        router_sgd is None or len(apart) > 0,
        "router_optimizer='sgd' finds no router with a matrix to train; choose 'adam'",
    )

    def grouped(chosen: Callable[[nn.Parameter], bool]) -> Groups:
        named = [(name, p) for name, p in model.named_parameters() if chosen(p)]
        return [
            {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
            {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
        ]

    groups = grouped(lambda p: p not in apart)
    if router_sgd is None:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    # Without momentum or adaptive moments, decoupled weight decay is the ordinary one.
    sgd = torch.optim.SGD(grouped(lambda p: p in apart), lr=router_sgd, fused=True)
    return AdamAndSGD(groups, sgd, router_sgd / lr, lr=lr, betas=betas, eps=eps, fused=True)


class AdamAndSGD(torch.optim.AdamW):
    """Adam, and plain SGD for some parameters at `ratio` times Adam's learning rate.

    One optimizer to whoever sets its rate, flags a bad update or saves its moments; SGD has none.
    """

    def __init__(self, groups: Groups, sgd: torch.optim.SGD, ratio: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.sgd, self.ratio = sgd, ratio

    def step(self, closure: Any = None) -> Any:
        for group in self.sgd.param_groups:
            group["lr"] = self.param_groups[0]["lr"] * self.ratio
        self.sgd.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
        self.sgd.step()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.sgd.zero_grad(set_to_none)
        super().zero_grad(set_to_none)


def router_matrices(model: nn.Module) -> set[nn.Parameter]:
    """What routers compare tokens with: the parameters a stretched token's gradient stretches."""
    return {
        parameter
        for module in model.modules()
        if isinstance(module, Router)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    }


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
