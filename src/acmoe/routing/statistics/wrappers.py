"""Find the objects of torch that train a layer: optimizers, and wrappers of torch.distributed.

A layer has no reference to the optimizer that holds its parameters, nor to the wrapper around it,
so they are looked for among all objects of the process. That takes about 0.1 s.
"""

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

Kind = TypeVar("Kind")
Wrapper = TypeVar("Wrapper", bound=nn.Module)


def instances_of(kind: type[Kind]) -> list[Kind]:
    """Return all objects of the process that are of this class or of a subclass.

    An object refers to its class, so the garbage collector finds them as referrers of the classes,
    several times faster than Python code looks at a list of all objects. The collector does not see
    objects that `gc.freeze` has put aside, as training loops do to keep collections short. So they
    are taken back, and all objects are put aside afterwards.
    """
    classes = _with_subclasses(kind)
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        # type(one) and not isinstance, which reads the __class__ of lazy objects, and loads them.
        return [one for one in gc.get_referrers(*classes) if type(one) in classes]
    finally:
        if frozen:
            gc.freeze()


def _with_subclasses(kind: type) -> set[type]:
    """Return a class, its subclasses, theirs and so on."""
    found, unread = {kind}, [kind]
    while unread:
        new: set[type] = set(unread.pop().__subclasses__()) - found
        found |= new
        unread += new
    return found


class Replicas:
    """The replicas of this process, listed once, and only if asked for."""

    @cached_property
    def listed(self) -> list[DistributedDataParallel]:
        return instances_of(DistributedDataParallel)

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        return iter(self.listed)


def around(module: nn.Module, wrappers: Iterable[Wrapper]) -> list[Wrapper]:
    """Return those wrappers that hold the module."""
    return [one for one in wrappers if any(inner is module for inner in one.modules())]


def meshes_of_shards(module: nn.Module) -> set[Any]:
    """Return the device meshes that `fully_shard` put the parameters around a module on.

    They are those of the innermost module that was sharded by itself. Its parameters have no mesh
    during its forward pass, when they are whole.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    holders = around(module, instances_of(fsdp.FSDPModule))
    for holder in sorted(holders, key=lambda one: sum(1 for _ in one.modules())):
        meshes = {
            parameter.sharded_param.device_mesh
            for group in _parameter_groups(holder)
            for parameter in group.fsdp_params
        }
        if meshes:
            return meshes
    return set()


def _parameter_groups(sharded: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 gathers at once; torch 2.10 has one at most."""
    state = sharded._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
