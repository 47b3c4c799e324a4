"""Override the capacity factor of all MoE layers for an evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from acmoe.config.model_checks import check_capacity
from acmoe.experts.moe import MoE


@contextmanager
def override_capacity(model: nn.Module, factor: float | None) -> Iterator[None]:
    """Set the capacity factor of every MoE layer of the model inside `with`.

    With a capacity, a full expert drops the tokens that rank lowest, so one image changes the
    result of another; None drops nothing. Report which of the two a figure was taken with.

    >>> # with override_capacity(model, None): accuracy(model, images)
    """
    check_capacity(factor, "factor")
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    before = [layer.capacity_factor for layer in layers]
    try:
        for layer in layers:
            layer.capacity_factor = factor
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            layer.capacity_factor = kept
