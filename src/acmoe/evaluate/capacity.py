"""The capacity of a model's experts: with one, an image's result depends on its batch."""

import contextlib
from collections.abc import Iterator

from torch import nn

from acmoe.experts.moe import MoE
from acmoe.models.capacity import override_capacity


def own_capacity(model: nn.Module) -> float | None:
    """The least capacity factor of its MoE layers; None where no token is ever dropped."""
    factors = [module.capacity_factor for module in model.modules() if isinstance(module, MoE)]
    return min((factor for factor in factors if factor is not None), default=None)


@contextlib.contextmanager
def using_capacity(model: nn.Module, *, dropless: bool) -> Iterator[float | None]:
    """Drop no token inside `with`, where asked; yields the capacity factor in force."""
    with override_capacity(model, None) if dropless else contextlib.nullcontext():
        yield own_capacity(model)
