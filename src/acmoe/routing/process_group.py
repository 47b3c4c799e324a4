"""The processes over whose tokens a model takes its statistics and its balance loss.

`acmoe.routing.statistics.group` finds the group of a layer where none is set here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from acmoe.errors import check
from acmoe.ops.statistics.over_ranks import ProcessGroup
from acmoe.routing.router import Router
from acmoe.routing.statistics.group import ALONE
from acmoe.routing.statistics.step import StepStatistics


def set_statistics_group(model: nn.Module, group: ProcessGroup | None) -> None:
    """Take the statistics and the balance loss of a model over the tokens of these processes.

    It is needed only where the layers cannot find the group themselves: with training loops that
    average gradients by other means than DistributedDataParallel and fully_shard. Call it on every
    process of the group. None: the model of this process is trained alone, as in a search over
    settings with one model per process.
    """
    known = getattr(group, "group_name", None)
    check(
        group is None or known is not None,
        f"group={group!r}; pass a process group of torch.distributed (dist.new_group), or None",
    )
    name = ALONE if group is None else str(known)
    for module in model.modules():
        if isinstance(module, StepStatistics):
            module.group_name, module.found_group = name, False
            module.everywhere = group is not None
        if isinstance(module, Router):
            module.balance_group = name


@contextmanager
def measuring_alone(model: nn.Module) -> Iterator[None]:
    """Inside `with`, take statistics over the tokens of this process alone, in evaluations."""
    groups = [(m, "group_name") for m in model.modules() if isinstance(m, StepStatistics)]
    balance = [(m, "balance_group") for m in model.modules() if isinstance(m, Router)]
    before = [(module, name, getattr(module, name)) for module, name in (*groups, *balance)]
    for module, name, _ in before:
        setattr(module, name, ALONE)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
