"""Expert capacity in evaluation. With a limit, the result of an image depends on its batch."""

import contextlib
from collections.abc import Iterator

from torch import nn

from acmoe.config.images.data import Capacity
from acmoe.errors import check
from acmoe.experts.moe import MoE
from acmoe.models.capacity import override_capacity

PAPERS = 1.25  # capacity factor of the paper's Swin-MoE, in training and evaluation


def own_capacity(model: nn.Module) -> float | None:
    """Return the least capacity factor of the MoE layers; None where no token is dropped."""
    factors = [module.capacity_factor for module in model.modules() if isinstance(module, MoE)]
    return min((factor for factor in factors if factor is not None), default=None)


@contextlib.contextmanager
def using_capacity(model: nn.Module, capacity: Capacity) -> Iterator[float | None]:
    """Set the capacity factor of every MoE layer inside `with`; yield the factor in use.

    None removes the limit, and "model" keeps the model's own.
    """
    if capacity == "model":
        yield own_capacity(model)
        return
    check(
        capacity is None or any(isinstance(module, MoE) for module in model.modules()),
        f"capacity={capacity}: the model has no experts that could be full; leave it out",
    )
    with override_capacity(model, capacity):
        yield own_capacity(model)


def capacity_text(factor: float | None) -> str:
    """Describe a capacity factor: `none`, `1.25 (the paper's)` or the number."""
    if factor is None:
        return "none"
    return f"{factor:g} (the paper's)" if factor == PAPERS else f"{factor:g}"
