"""Schedules of a pipeline, by torch.distributed.pipelining.

Stage s of n lies on process s mod P of the P processes of a pipeline: with "1f1b" each process has
one stage, with "interleaved" two. torch.distributed.pipelining is imported where it is used: that
takes 0.8 s, which a run in one process saves.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from acmoe.config.parallel import ParallelConfig
from acmoe.distributed.ranks import Ranks
from acmoe.errors import check

# Older versions ask for a gradient of every tensor between stages; the clusters are integers.
OLDEST_TORCH = (2, 13)
Loss = Callable[[tuple[Tensor, ...], Tensor], Tensor]


class StagePlan(NamedTuple):
    """A stage of this process, and tensors like those it receives and sends."""

    module: nn.Module
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def check_torch() -> None:
    """Raise a UserError if this torch cannot send integers between stages."""
    version = torch.__version__
    found = tuple(int(number) for number in version.split("+")[0].split(".")[:2])
    check(
        found >= OLDEST_TORCH,
        f"parallel.pipeline needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, and this is "
        f"{version}; omit it",
    )


def own_stages(ranks: Ranks, config: ParallelConfig) -> list[int]:
    """Return the numbers of the stages of this process."""
    return list(range(stage_rank(ranks), config.stages, config.pipeline))


def stage_rank(ranks: Ranks) -> int:
    """Return the number of this process among those of its pipeline."""
    return 0 if ranks.mesh is None else ranks.mesh.get_local_rank("pipeline")


def pipeline_group(ranks: Ranks) -> ProcessGroup:
    """Return the processes of this process's pipeline."""
    assert ranks.mesh is not None
    return ranks.mesh["pipeline"].get_group()


def build_schedule(
    plans: Mapping[int, StagePlan],
    *,
    num_stages: int,
    micro_batches: int,
    loss: Loss | None,
    group: ProcessGroup,
    device: torch.device,
) -> Any:
    """Return the schedule of this process, whose stages are `plans`; all processes must call it.

    Its `step(tokens, target=..., **kwargs)` cuts all tensors into micro-batches along dimension 0;
    the process of the first stage alone passes the tokens. Without `loss` it runs forward only.
    The shapes are given and never inferred: torch would run the stages on integers from
    uninitialised memory.
    """
    from torch.distributed import pipelining

    logger = logging.getLogger(pipelining.__name__)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)  # it prints the schedule at an error, which is raised too
    stages: list[Any] = [
        pipelining.PipelineStage(
            plan.module,
            number,
            num_stages,
            device,
            input_args=tuple(plan.inputs),
            output_args=tuple(plan.outputs),
            group=group,
        )
        for number, plan in plans.items()
    ]
    # The loss of a micro-batch is divided by their number already.
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if len(stages) > 1:
        return pipelining.ScheduleInterleaved1F1B(stages, micro_batches, **options)
    if loss is None:
        return pipelining.ScheduleGPipe(stages[0], micro_batches, **options)
    return pipelining.Schedule1F1B(stages[0], micro_batches, **options)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the error of a stage as it was raised, without the report of its arguments."""
    try:
        yield
    except RuntimeError as error:
        if "failed to run" in str(error).lower() and isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
