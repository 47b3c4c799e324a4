"""The processes whose tokens enter one statistic, in data parallel training.

Every process of a data parallel run holds a copy of the model and sees tokens of its own. If each
moved its running averages by its own tokens alone, the copies would drift apart. So the pending
batches of an optimizer step are pooled first (`pool`): one reduction adds the sums of all
statistics over the group, and all copies then make the same update.

The group of a layer is the one of `set_statistics_group`, or the one that the training loop uses:
that of the `DistributedDataParallel` around it, or of the device mesh that `fully_shard` put its
parameters on. If torch.distributed runs several processes and neither is found, an error names the
function to call, because copies that drift apart would go unnoticed.
"""

import itertools
import weakref
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from acmoe.errors import UserError, check
from acmoe.ops.statistics.over_ranks import (
    add_up,
    everyone,
    of_each_rank,
    world_size,
)
from acmoe.routing.statistics.registry import inner_first, look_again, parameters_around
from acmoe.routing.statistics.wrappers import Replicas, around, meshes_of_shards

if TYPE_CHECKING:
    from acmoe.routing.statistics.step import StepStatistics

ALONE = ""  # name of the group of a process that pools with nobody

_agreed: set[tuple[object, ...]] = set()  # groups and shapes that all ranks were found to share
# The wrappers around statistics, of which one may begin to join at any time.
_wrappers: "weakref.WeakKeyDictionary[StepStatistics, list[weakref.ref[nn.Module]]]"
_wrappers = weakref.WeakKeyDictionary()


def group_of(statistics: "StepStatistics") -> str:
    """Return the name of the group that these statistics are pooled over, or ALONE."""
    if world_size() == 1:
        return ALONE
    if statistics.group_name is not None:
        return statistics.group_name
    return _look_up(statistics)


@_disable_dynamo  # torch.compile breaks its graph here; it cannot trace the garbage collector
def _look_up(statistics: "StepStatistics") -> str:
    """Find the group of these statistics, and keep it.

    The same list of replicas gives the groups of all layers in the same replica.
    """
    replicas = Replicas()
    found = _find(statistics, replicas) or _find_shards(statistics)
    if found is None:
        raise UserError(
            f"running statistics: torch.distributed runs {world_size()} processes, and the model "
            "is neither in a DistributedDataParallel nor sharded by fully_shard; call "
            "acmoe.set_statistics_group(model, group) with the processes that average its "
            "gradients (torch.distributed.group.WORLD for all), or with None if each trains a "
            "model of its own"
        )
    _set_found(statistics, found)
    _find_each(inner_first(*found.wrappers), replicas)
    return found.name


def find_groups(statistics: "Iterable[StepStatistics]", trained: Set[int]) -> None:
    """Look for the groups of statistics that have none yet; one that is not found stays unknown.

    A layer in a DistributedDataParallel, or sharded by fully_shard, is on all processes of its
    group. They must all take part in pooling its statistics, also one that has not called it yet.
    trained: ids of the parameters that optimizers hold. A wrapper without any of them does not
    count: it may be the copy of one, an average of the weights that one process makes.
    """
    unknown = [one for one in statistics if one.group_name is None]
    if world_size() == 1 or not unknown:
        return
    replicas = [one for one in Replicas() if not trained.isdisjoint(map(id, one.parameters()))]
    _find_each(unknown, replicas)


def _find_each(
    statistics: "Iterable[StepStatistics]", replicas: Iterable[DistributedDataParallel]
) -> None:
    """Give statistics without a group the one of their replicas, if they are in one."""
    for one in statistics:
        with suppress(UserError):  # `group_of` raises it if the group is needed
            found = _find(one, replicas) if one.group_name is None else None
            if found is not None:
                _set_found(one, found)


def pooled_groups(statistics: "Iterable[StepStatistics]") -> list[str]:
    """Return the names of the groups that these statistics are pooled over, sorted."""
    return sorted({group_of(one) for one in statistics if one.pools} - {ALONE})


class Found(NamedTuple):
    """The group by which a training loop averages the gradients of a layer."""

    name: str
    wrappers: Sequence[nn.Module] = ()  # the group is known from these, as long as they exist


def _find(
    statistics: "StepStatistics", replicas: Iterable[DistributedDataParallel]
) -> Found | None:
    """Find the group in the device meshes of the layer's parameters, or in one of the replicas."""
    # A DTensor has a mesh; None stands for parameters that every process has whole.
    meshes = {getattr(one, "device_mesh", None) for one in parameters_around(statistics)}
    if meshes and None not in meshes:
        return Found(_group_of_meshes(meshes))
    holders = around(statistics, replicas)
    if holders:
        return Found(_group_of_replicas(holders), holders)
    return Found(_group_of_meshes(meshes)) if any(meshes) else None


def _find_shards(statistics: "StepStatistics") -> Found | None:
    """Find the group of a layer whose parameters FSDP2 has gathered for a forward pass."""
    meshes = meshes_of_shards(statistics)
    return Found(_group_of_meshes(meshes)) if meshes else None


def _set_found(statistics: "StepStatistics", found: Found) -> None:
    """Give the statistics the group; they lose it with the wrapper that it is known from."""
    statistics.group_name, statistics.found_group, statistics.everywhere = found.name, True, True
    _wrappers[statistics] = [weakref.ref(wrapper) for wrapper in found.wrappers]
    for wrapper in found.wrappers:
        weakref.finalize(wrapper, _forget_group, weakref.ref(statistics)).atexit = False


def _forget_group(reference: "weakref.ref[StepStatistics]") -> None:
    """Forget a group whose wrapper is gone; the next step looks for another one.

    It looks on every process, also on one that has not called the layer: the others wait for it.
    """
    statistics = reference()
    if statistics is not None and statistics.found_group:
        statistics.forget_found_group()
        look_again()


def _group_of_meshes(meshes: Set[Any]) -> str:
    """Return the group of the device mesh that a layer's parameters lie on, or of all processes.

    Parameters on several meshes, as with distributed experts, do not say who sees other tokens.
    """
    only = next(iter(meshes)) if len(meshes) == 1 else None
    if only is not None and only.ndim == 1:
        return str(only.get_group().group_name)
    shapes = sorted(tuple(mesh.shape) for mesh in meshes if mesh is not None)
    check(
        all(mesh.size() == world_size() for mesh in meshes if mesh is not None),
        f"running statistics: the parameters of a layer lie on meshes "
        f"{' and '.join(map(str, shapes))} of {world_size()} processes; say which of them see "
        "tokens of their own: "
        "acmoe.set_statistics_group(model, group)",
    )
    return everyone()


def _group_of_replicas(replicas: Sequence[DistributedDataParallel]) -> str:
    """Return the one group of the replicas that hold a layer."""
    names = {str(one.process_group.group_name) for one in replicas}
    check(
        len(names) == 1,
        f"running statistics: a layer is in {len(replicas)} DistributedDataParallel of "
        f"{len(names)} different groups of processes; say which of them see tokens of their own: "
        "acmoe.set_statistics_group(model, group)",
    )
    for one in replicas:
        _refuse_join(one)
    return names.pop()


def _refuse_joins(statistics: "Sequence[StepStatistics]") -> None:
    """Raise a UserError if a process may leave the group of these statistics before the others.

    Where the user has set the group, the wrappers are looked for here, once.
    """
    replicas = Replicas()
    for one in statistics:
        if one not in _wrappers or any(known() is None for known in _wrappers[one]):
            _wrappers[one] = [weakref.ref(wrapper) for wrapper in around(one, replicas)]
    for wrapper in {known() for one in statistics for known in _wrappers[one]}:
        if isinstance(wrapper, DistributedDataParallel):
            _refuse_join(wrapper)


def _refuse_join(wrapper: DistributedDataParallel) -> None:
    config = wrapper._join_config
    check(
        not config.enable or config.throw_on_early_termination,
        "running statistics: inside DistributedDataParallel.join a process without batches leaves "
        "the others, whose statistics need it at every step; give all processes the same number of "
        "batches, or join with throw_on_early_termination=True",
    )


@torch.no_grad()
def pool(statistics: "Iterable[StepStatistics]") -> None:
    """Replace the pending batches of each process by those of all processes of its group.

    One reduction for each group and device, whatever the number of layers.
    """
    if world_size() == 1:
        return
    places: dict[tuple[str, torch.device], list[StepStatistics]] = {}
    for one in sorted(statistics, key=lambda one: one.serial):  # the same order on all ranks
        name = group_of(one) if one.pools else ALONE
        if name == ALONE:
            one.take_own()
        else:
            places.setdefault((name, one.device), []).append(one)
    _refuse_joins([one for members in places.values() for one in members])
    for (name, _), members in places.items():
        sums = [one.pending_sums() for one in members]
        _check_agreement(name, sums)
        total = torch.cat(sums)
        add_up(total, name)
        parts = torch.split(total, [len(each) for each in sums])
        for one, part in zip(members, parts, strict=True):
            one.set_pending(part)


def update_all(statistics: "Iterable[StepStatistics]") -> None:
    """Update the running values of the statistics with their pending batches, pooled first."""
    statistics = list(statistics)
    pool(statistics)
    for one in statistics:
        one.update()
        if one.has_pending:
            one.has_pending, one.forwards = False, 0


def _check_agreement(name: str, sums: Sequence[Tensor]) -> None:
    """Raise on every rank if the ranks would add up different statistics; asked once each."""
    sizes = (name, *(len(each) for each in sums))
    if sizes in _agreed:
        return
    found = of_each_rank(sizes[1:], name)
    odd = [rank for rank, each in enumerate(found) if each != found[0]]
    check(
        not odd,
        f"running statistics: rank {odd[0] if odd else 0} of the group has layers of sizes "
        f"{found[odd[0]] if odd else ()}, rank 0 of {found[0]}; ranks that pool statistics "
        "must train the same layers: give each pipeline stage a group of its own with "
        "acmoe.set_statistics_group(model, group)",
    )
    _agreed.add(sizes)


_serials = itertools.count()


def next_serial() -> int:
    """Return a number by which statistics are ordered as they were built."""
    return next(_serials)
