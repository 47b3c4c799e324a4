"""Put a model on all processes of a run.

FSDP2 is imported where it is used: that takes 0.8 s, which a run in one process saves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acmoe.config.parallel import ParallelConfig
from acmoe.distributed.experts import distribute_experts, distributed_experts
from acmoe.distributed.experts_ddp import REPLICA_OPTIONS, ReplicaWithExperts
from acmoe.distributed.ranks import Ranks
from acmoe.errors import check
from acmoe.routing.baselines.stable import StableRouter
from acmoe.routing.process_group import set_statistics_group


def parallelize(model: nn.Module, ranks: Ranks, config: ParallelConfig) -> nn.Module:
    """Return the module to call in training; its backward averages gradients over all processes.

    The names of parameters and the running statistics stay those of `model`. With "fsdp" the model
    is sharded in place and returned. Call it before the optimizer is made.
    """
    if ranks.data is None or ranks.mesh is None:
        return model
    if config.pipeline > 1:  # the model holds some stages; its caller averages gradients
        set_statistics_group(model, ranks.statistics if ranks.data_size > 1 else None)
        return model
    set_statistics_group(model, ranks.statistics)
    if config.expert > 1:
        distribute_experts(model, ranks.mesh["expert"])
    if config.shard == "fsdp":
        _check_sharding(model)
        return _shard(model, ranks)
    if config.expert > 1:
        return ReplicaWithExperts(model, ranks)
    return DistributedDataParallel(model, process_group=ranks.data.get_group(), **REPLICA_OPTIONS)


def _shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Shard each block, then the rest, so that one block at a time is whole.

    Experts that are distributed already are sharded over the processes that hold the same ones.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Autocast casts the weights, as in one process. FSDP2's own casts would round the routing
    # state, whose scale is float32, between blocks.
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    for experts in distributed_experts(model):
        assert ranks.mesh is not None
        fully_shard(experts, mesh=ranks.mesh["replicate"], mp_policy=precision)
    for block in cast(Iterable[nn.Module], model.blocks):
        fully_shard(block, mesh=ranks.data, mp_policy=precision)
    fully_shard(model, mesh=ranks.data, mp_policy=precision)
    return model


@contextmanager
def averaging(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Average gradients over processes inside `with` if `enabled`; else only accumulate them."""
    if isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    set_averaging = getattr(module, "set_requires_gradient_sync", None)  # a method of FSDPModule
    if set_averaging is not None:
        set_averaging(enabled)
    yield
    if isinstance(module, ReplicaWithExperts):
        module.average_experts()


def _check_sharding(model: nn.Module) -> None:
    check(
        not any(isinstance(module, StableRouter) for module in model.modules()),
        "parallel.shard=fsdp cannot freeze a router during the run, as router=stable does; use "
        "parallel.shard=ddp",
    )
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    check(
        not scalars,
        f"parallel.shard=fsdp cannot shard {', '.join(scalars[:1])}, which is a single number; use "
        "parallel.shard=ddp",
    )
