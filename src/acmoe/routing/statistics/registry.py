"""The layers and statistics of this process, by which optimizer steps find what they update.

A layer is a module that called `register_layer`: `MoE`, `SoftMoE`, any `Router`. Layers and
statistics are held weakly, so that they are freed as other modules are.
"""

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn

if TYPE_CHECKING:
    from acmoe.routing.statistics.step import StepStatistics

registry_lock = threading.RLock()
_statistics: "weakref.WeakSet[StepStatistics]" = weakref.WeakSet()
_layers: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_numbers = itertools.count(1)
_changes = 0  # the number of the last call of `look_again`


class Layer(nn.Module):
    """A module with running statistics; the optimizer that trains its parameters updates them."""

    def __init__(self) -> None:
        super().__init__()
        register_layer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register_layer(self)


def register_layer(layer: nn.Module) -> None:
    """Give the statistics inside a module to the optimizer that holds a parameter of it."""
    _add(_layers, layer)


def add_statistics(statistics: "StepStatistics") -> None:
    """Remember statistics that were built or copied."""
    _add(_statistics, statistics)


def _add(registry: "weakref.WeakSet[Any]", module: nn.Module) -> None:
    with registry_lock:
        registry.add(module)
        look_again()


def look_again() -> None:
    """Have the next step of every optimizer look up its statistics and their groups again.

    The garbage collector calls it, in whatever thread it runs, when a wrapper is gone. So it waits
    for no lock: that thread may hold another one for which the owner of `registry_lock` waits.
    """
    global _changes
    _changes = next(_numbers)


def changes() -> int:
    """Return a number that is another one after every `look_again`."""
    return _changes


def inner_first(*modules: nn.Module) -> "Iterator[StepStatistics]":
    """Yield the statistics in the modules once each, inner ones first.

    An outer scale may be computed from the results of an inner `update`.
    """
    found = itertools.chain.from_iterable(reversed(list(each.modules())) for each in modules)
    return (cast("StepStatistics", one) for one in dict.fromkeys(found) if one in _statistics)


def parameters_of_statistics() -> "dict[StepStatistics, set[nn.Parameter]]":
    """Return for all statistics the parameters of the layers around them, and their own."""
    owned = {one: set(one.parameters()) for one in _statistics}
    for layer in _layers:
        parameters = set(layer.parameters())
        for module in layer.modules():
            if module in owned:
                owned[module] |= parameters
    return owned


def parameters_around(statistics: "StepStatistics") -> "set[nn.Parameter]":
    """Return the parameters of the layers around these statistics, and their own."""
    with registry_lock:
        return parameters_of_statistics().get(statistics, set())
