"""The optimizer and the learning-rate schedule."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acmoe.distributed.whole import by_mesh, like, whole
from acmoe.errors import check
from acmoe.experts.old_names import current_name
from acmoe.routing.router import Router
from acmoe.storage.shards import Stored

Groups = list[dict[str, Any]]


class Schedule(Protocol):
    """A learning-rate schedule, counted in updates; a config of a language run is one."""

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
    """Return the learning rate of update `step`, counted from 1.

    It rises linearly from 0 to lr over the warmup, then stays constant or falls as half a cosine.
    The first update uses lr / warmup, the last one of a cosine uses min_lr.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / (config.steps - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups; in place where it is a tensor, for CUDA graphs."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True for parameters of two or more dimensions."""
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
    """Make Adam over all parameters, with decoupled weight decay; the paper has no weight decay.

    `decays` tells from a parameter's name and shape whether weight decay applies to it.
    `router_sgd` is the learning rate of plain SGD on the routers' matrices while Adam has `lr`;
    None trains them by Adam as well.

    Frozen parameters are included: a router may be frozen during the run, and a run that resumes
    afterwards must list the same parameters.
    """
    check_router_sgd(model, router_sgd)
    sgd_parameters = set() if router_sgd is None else router_matrices(model)

    def grouped(chosen: Callable[[nn.Parameter], bool]) -> Groups:
        named = [(name, p) for name, p in model.named_parameters() if chosen(p)]
        decayed = [p for name, p in named if decays(name, p)]
        others = [p for name, p in named if not decays(name, p)]
        return [
            {"params": params, "weight_decay": decay}
            for all_params, decay in ((decayed, weight_decay), (others, 0.0))
            for params in by_mesh(all_params) or [[]]
        ]

    groups = grouped(lambda p: p not in sgd_parameters)
    if router_sgd is None:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    # SGD without momentum has the same update for decoupled and for ordinary weight decay.
    sgd = torch.optim.SGD(grouped(lambda p: p in sgd_parameters), lr=router_sgd, fused=True)
    return AdamAndSGD(groups, sgd, router_sgd / lr, lr=lr, betas=betas, eps=eps, fused=True)


class AdamAndSGD(torch.optim.AdamW):
    """Adam, and plain SGD for some parameters at `ratio` times Adam's learning rate.

    Its groups and state are Adam's, so callers set the rate, flag a bad update (`found_inf`) and
    save the moments as with one optimizer; plain SGD has no state.
    """

    def __init__(self, groups: Groups, sgd: torch.optim.SGD, ratio: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.sgd, self.ratio = sgd, ratio

    def step(self, closure: Any = None) -> Any:
        """Step both optimizers."""
        for group in self.sgd.param_groups:
            group["lr"] = self.param_groups[0]["lr"] * self.ratio
        self.sgd.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
        self.sgd.step()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both optimizers."""
        self.sgd.zero_grad(set_to_none)
        super().zero_grad(set_to_none)


def check_router_sgd(model: nn.Module, router_sgd: float | None) -> None:
    """Raise a UserError if SGD shall train routers, and the model has none with a matrix."""
    check(
        router_sgd is None or len(router_matrices(model)) > 0,
        "router_optimizer='sgd' finds no router with a matrix to train; choose 'adam'",
    )


def router_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the routers' own matrices, whose gradients scale with the features of the tokens."""
    return {
        parameter
        for module in model.modules()
        if isinstance(module, Router)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return moments and step counts by `optimizer/KIND/PARAMETER`, whole on all processes."""
    return {name: whole(value) for name, value in optimizer_shards(optimizer, model).items()}


def optimizer_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return moments and step counts as this process has them."""
    return {
        f"optimizer/{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def empty_optimizer_shards(model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Return empty tensors for the stored moments and step counts of this process's parameters."""
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for key, (shape, dtype) in stored.items():
        prefix, _, rest = key.partition("/")
        parameter = parameters.get(rest.partition("/")[2])
        if prefix != "optimizer" or parameter is None:
            continue
        moment = shape == parameter.shape
        found[key] = (
            torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            if moment
            else torch.empty(shape, dtype=dtype)
        )
    return found


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` returned; other tensors are ignored."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        prefix, _, rest = key.partition("/")
        if prefix == "optimizer":
            kind, _, name = rest.partition("/")
            parameter = parameters[current_name(name)]
            optimizer.state[parameter][kind] = like(value.to(parameter.device), parameter)
