"""How many tokens an expert takes, changed for one evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from acmoe.errors import check
from acmoe.experts.moe import MoE


@contextmanager
def override_capacity(model: nn.Module, factor: float | None) -> Iterator[None]:
    """Inside `with`, every MoE layer of the model has this capacity factor.

    A full expert drops the tokens of whichever images rank lower, so one image changes another's
    result; None drops nothing. Report which of the two a figure was taken with.

    >>> # with override_capacity(model, None): accuracy(model, images)
    """
    check(
        factor is None or factor > 0,
        f"factor={factor}; it must be positive, or None for dropless",
    )
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    before = [layer.capacity_factor for layer in layers]
    try:
        for layer in layers:
            layer.capacity_factor = factor
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            layer.capacity_factor = kept
