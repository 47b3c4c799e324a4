"""Find what was set on a model's modules by hand: an attribute, such as a capacity, or a module.

A saved model is its tensors and its config, so that a loaded one has the attributes of its config.
"""

import warnings
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from acmoe.ops.checks import has_values

LEFT_OUT = {
    *("training", "checkpoint_blocks", "balance_group"),  # how a model runs
    "stage",  # the stage of a StableMoE router, which is saved among the tensors
    # the state of statistics and of the plan of layers
    *("fixed", "serial", "scaled_from", "scaled_version", "checked"),
    *("group_name", "found_group", "everywhere", "forwards", "has_pending"),
}
Value = bool | int | float | str | tuple | None  # type: ignore[type-arg]


def warn_of_attributes(model: nn.Module, built: nn.Module, *, stacklevel: int) -> None:
    """Warn if a loaded model, such as `built`, would lack what was set on `model` by hand."""
    changes = set_by_hand(model, built)
    if changes:
        warnings.warn(
            f"{type(model).__name__} is saved with the attributes of its config, and was changed: "
            f"{'; '.join(changes[:3])} ({len(changes)} in all); set them again after loading, or "
            "build the model with a config that has them",
            stacklevel=stacklevel + 1,
        )


def set_by_hand(model: nn.Module, built: nn.Module) -> list[str]:
    """Return "module.attribute=value, not value" for each that differs from the built model's.

    A module of another class, such as nn.Identity for a dropout, is named by its class. Subclasses
    are not: fully_shard makes one of every class.
    """
    modules = dict(model.named_modules())
    found: list[str] = []
    for path, plain in built.named_modules():
        module = modules.get(path, plain)
        if not isinstance(module, type(plain)):
            found.append(f"{path}={type(module).__name__}, not {type(plain).__name__}")
            continue
        prefix = f"{path}." if path else ""
        for name, value in vars(plain).items():
            if not name.startswith("_") and name not in LEFT_OUT:
                found += _difference(prefix + name, getattr(module, name, value), value)
    return found


def _difference(name: str, now: Any, built: Any) -> list[str]:
    """Return how two values or two configs differ, or that a tensor is in the place of a value.

    Numbers of numpy are values, too. Other objects are not compared.
    """
    if isinstance(now, Tensor) and isinstance(built, Value):
        if now.numel() != 1 or not has_values(now):
            return [f"{name}=a tensor of shape {tuple(now.shape)}, not {built!r}"]
        now = now.item()
    elif isinstance(now, Real) and hasattr(now, "item"):  # a number of numpy
        now = now.item()
    if is_dataclass(built) and type(now) is type(built):
        of_fields = (
            _difference(f"{name}.{each.name}", getattr(now, each.name), getattr(built, each.name))
            for each in fields(built)
        )
        return [change for changes in of_fields for change in changes]
    if isinstance(now, Value) and isinstance(built, Value):
        same = now == built
    else:
        same = not is_dataclass(now) and not is_dataclass(built)
    return [] if same else [f"{name}={now!r}, not {built!r}"]
