"""Update running statistics after every optimizer step, for the layers that the optimizer trains.

torch calls a global hook after each `Optimizer.step`. The hook updates

  - the statistics of every layer of which the optimizer holds a parameter, and
  - the statistics of layers of which no optimizer holds one: all of their parameters are frozen, or
    the optimizer holds copies of them (flat parameters of FSDP1, master weights).

So two models with two optimizers do not disturb each other, and an optimizer that trains adapters
alone still moves the averages. The hook works on the host: it reads no tensor, and what it launches
can be captured in a CUDA graph.

A layer is a module that called `register_layer`: `MoE`, `SoftMoE`, any `Router`. Statistics, layers
and optimizers are held weakly, and the parameters of a layer are looked up when an optimizer is
first seen, when its groups get other parameters, when another one is gone, when layers are built or
copied and when a wrapper of torch.distributed around them is gone. Modules may therefore be copied,
pickled, moved and sharded without telling the hook.
"""

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._guards import active_fake_mode
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from acmoe.config.routing import AdaptiveConfig
from acmoe.ops.checks import has_values
from acmoe.ops.dispatch import log_once
from acmoe.ops.statistics.over_ranks import is_distributed, world_size
from acmoe.ops.statistics.pending import replaying
from acmoe.routing.counted_states import count_step
from acmoe.routing.statistics.group import find_groups, update_all
from acmoe.routing.statistics.registry import (
    add_statistics,
    changes,
    inner_first,
    look_again,
    parameters_of_statistics,
    registry_lock,
)
from acmoe.routing.statistics.wrappers import instances_of

if TYPE_CHECKING:
    from acmoe.routing.statistics.step import StepStatistics


References = Sequence["weakref.ref[StepStatistics]"]


class Trained(NamedTuple):
    """The statistics that an optimizer's steps update, inner modules first."""

    key: tuple[int, ...] = ()  # changes when the statistics must be looked up again
    held: References = ()  # the optimizer holds a parameter of their layer
    unclaimed: References = ()  # no optimizer holds a parameter of their layer
    searched: bool = False  # True: optimizers that have not stepped yet were looked for, too


# The optimizers that have stepped, and those without a step that a search has found. Each has what
# it trains by the hash of its parameters: some loops step with one parameter group after the other.
_trained: "weakref.WeakKeyDictionary[Optimizer, dict[int, Trained]]" = weakref.WeakKeyDictionary()
# Hashes that are kept for an optimizer. An optimizer with new parameters in every step would keep
# one for each step.
MOST_HASHES = 64
_hooks: list[Any] = []


def register_statistics(statistics: "StepStatistics") -> None:
    """Have optimizer steps update these statistics. The first call registers the hook."""
    add_statistics(statistics)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


# Dynamo must not trace it: torch.compile(optimizer.step) breaks its graph here.
@_disable_dynamo
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Update the statistics, or let the backward do it at its end if the step was taken inside one.

    An optimizer in a gradient hook steps before activation checkpointing has repeated the blocks
    below, which must find the statistics that their forward read. Compiled autograd never calls
    what is queued by code that it has not traced, such as this: there the update comes at once.
    """
    if replaying() and not _autograd_is_compiled():
        Variable._execution_engine.queue_callback(partial(_update, optimizer))
    else:
        _update(optimizer)


def _autograd_is_compiled() -> bool:
    """Return True inside a backward that compiled autograd runs."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def _update(optimizer: Optimizer) -> None:
    trained = trained_by(optimizer)
    configs = [getattr(one, "config", None) for one in _alive(trained.held)]
    if any(isinstance(config, AdaptiveConfig) for config in configs):
        count_step()
    update_all(_alive(trained.held))
    if active_fake_mode() is not None:  # a step that computes nothing leaves other layers alone
        return
    unclaimed = [one for one in _alive(trained.unclaimed) if _trains(one)]
    if not trained.searched and any(one.has_pending or world_size() > 1 for one in unclaimed):
        # They may belong to an optimizer that has not taken its first step yet. To find it takes
        # about 0.1 s, so this is done only where a batch is pending, here or on another process.
        trained = trained_by(optimizer, search=True)
        unclaimed = [one for one in _alive(trained.unclaimed) if _trains(one)]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        # A captured update writes at every replay, also after the model it belongs to is freed.
        left_out = [one for one in unclaimed if not one.has_pending]
        unclaimed = [one for one in unclaimed if one.has_pending]
        if left_out:
            log_once(
                f"running statistics: a captured optimizer step leaves out {len(left_out)} of "
                "layers of which no optimizer holds a parameter; if they are of the captured "
                "model, call acmoe.fold_statistics(model) inside the capture",
                logging.WARNING,
            )
    update_all(unclaimed)


def _trains(statistics: "StepStatistics") -> bool:
    """Return False for a copy that is not trained, such as a teacher, and for what cannot change.

    A copy may be on one of several processes alone, as an average of the weights often is: to pool
    it would wait for the others for ever.
    """
    fixed = any(not has_values(buffer) or buffer.is_inference() for buffer in statistics.buffers())
    return statistics.training and statistics.seen and not fixed


def trained_by(optimizer: Optimizer, *, search: bool = False) -> Trained:
    """Return the statistics that a step of the optimizer updates.

    search: look among all objects of the process for optimizers that have not stepped yet.
    """
    with registry_lock:
        by_parameters = _trained.setdefault(optimizer, {})
        parameters = _hash_of_parameters(optimizer)
        if parameters not in by_parameters:
            if len(by_parameters) >= MOST_HASHES:
                by_parameters.clear()
            look_again()  # it may hold parameters that no optimizer held until now
        if search:
            _add_without_step()
        key = (changes(), len(_trained))
        trained = by_parameters.get(parameters)
        if trained is None or trained.key != key or search:
            trained = by_parameters[parameters] = Trained(key, *_find(optimizer), search)
        return trained


def _hash_of_parameters(optimizer: Optimizer) -> int:
    """Return a number that changes with the parameters that the optimizer holds.

    It is computed in every step, in about 0.2 us for each parameter; a step takes far longer.
    """
    return hash(tuple([id(one) for group in optimizer.param_groups for one in group["params"]]))


def _add_without_step() -> None:
    """Add optimizers that have not stepped yet, if one may hold a layer that no other one holds.

    They stay known: the optimizers of a loop with one for each parameter are found by one search.
    """
    owned = parameters_of_statistics()
    unclaimed = _without(_ids(list(_trained)), owned)
    if any(p.requires_grad for one in unclaimed for p in owned[one]):
        for optimizer in instances_of(Optimizer):
            _trained.setdefault(optimizer, {})


def _find(optimizer: Optimizer) -> tuple[References, References]:
    if _is_share(optimizer):
        return (), ()
    owned = parameters_of_statistics()
    trained = _ids(list(_trained))
    unclaimed = _without(trained, owned)
    find_groups(unclaimed, trained)
    held = owned.keys() - _without(_ids([optimizer]), owned)
    return _references(held), _references(unclaimed)


def _without(
    ids: set[int], owned: "dict[StepStatistics, set[nn.Parameter]]"
) -> "set[StepStatistics]":
    """Return the statistics of layers without any parameter of these ids."""
    return {one for one, owner in owned.items() if ids.isdisjoint(map(id, owner))}


def _is_share(optimizer: Optimizer) -> bool:
    """Return True for the optimizer that a ZeroRedundancyOptimizer gives the share of a process.

    Processes hold different layers in theirs, so the statistics wait for the step of the whole.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not is_distributed():
        return False
    kind = module.ZeroRedundancyOptimizer
    return any(getattr(one, "optim", None) is optimizer for one in instances_of(kind))


def _references(statistics: "Iterable[StepStatistics]") -> References:
    return [weakref.ref(one) for one in inner_first(*statistics)]


def _alive(references: References) -> "Iterator[StepStatistics]":
    return (one for reference in references if (one := reference()) is not None)


def _ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of all parameters that the optimizers hold."""
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    return {id(parameter) for group in groups for parameter in group["params"]}
