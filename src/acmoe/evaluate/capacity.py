"""Expert capacity in evaluation. With a limit, the result of an image depends on its batch."""

import contextlib
from collections.abc import Iterator

from torch import nn

from acmoe.experts.moe import MoE
from acmoe.models.capacity import override_capacity


def own_capacity(model: nn.Module) -> float | None:
    """Return the least capacity factor of the MoE layers; None where no token is dropped."""
    factors = [module.capacity_factor for module in model.modules() if isinstance(module, MoE)]
    return min((factor for factor in factors if factor is not None), default=None)


@contextlib.contextmanager
def using_capacity(model: nn.Module, *, dropless: bool) -> Iterator[float | None]:
    """Remove the capacity limit inside `with` if `dropless`; yield the capacity factor in use."""
    with override_capacity(model, None) if dropless else contextlib.nullcontext():
        yield own_capacity(model)
