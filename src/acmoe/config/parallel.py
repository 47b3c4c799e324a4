"""Options for the processes of a training run: how they share its work."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from acmoe.config.updates import check_count
from acmoe.errors import check, check_choice


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The processes of a run: `data` times `pipeline` of them, which torchrun must start.

    A run may be continued with other values.
    """

    data: int = 1  # shares of each batch; a process, or a pipeline of them, computes each
    # ddp: every process holds the whole model. fsdp: parameters and moments are sharded (FSDP2).
    shard: Literal["ddp", "fsdp"] = "ddp"
    # Processes that share the experts of a layer: each holds 1/expert of them, and tokens travel
    # to their experts. It divides `data`: these processes also have shares of the batch.
    expert: int = 1
    pipeline: int = 1  # processes that share the blocks of the model
    # Order of the micro-batches in a pipeline. interleaved: each process has two stages, which
    # halves the time that processes wait, and doubles what they send.
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    # whole: the first process writes checkpoints, in the format of `acmoe.save`. sharded: every
    # process writes its part. async: the same, while training goes on.
    save: Literal["whole", "sharded", "async"] = "whole"

    def __post_init__(self) -> None:
        check_count(self.data, "parallel.data")
        check_count(self.expert, "parallel.expert")
        check_count(self.pipeline, "parallel.pipeline")
        check_choice(self.shard, ("ddp", "fsdp"), "parallel.shard")
        check_choice(self.schedule, ("1f1b", "interleaved"), "parallel.schedule")
        check_choice(self.save, ("whole", "sharded", "async"), "parallel.save")
        check(
            self.data % self.expert == 0,
            f"parallel.expert={self.expert} must divide parallel.data={self.data}: processes that "
            "share experts are some of those that share the batch",
        )

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.data * self.pipeline

    @property
    def stages(self) -> int:
        """The number of stages that the blocks of the model are cut into."""
        return self.pipeline * (2 if self.schedule == "interleaved" else 1)

    def __str__(self) -> str:
        """Return the settings that decide the number of processes, as a user gives them."""
        pipeline = f" parallel.pipeline={self.pipeline}" if self.pipeline > 1 else ""
        return f"parallel.data={self.data}{pipeline}"


class ParallelRun(Protocol):
    """The fields of a run's config that `check_parallel` reads."""

    @property
    def parallel(self) -> ParallelConfig: ...
    @property
    def batch(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def compile(self) -> bool: ...
    @property
    def graph(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def model(self) -> Any: ...


def check_parallel(run: ParallelRun, *, rows: str) -> None:
    """Check that the settings of a run are possible with its number of processes.

    `rows` names the items of a batch in error messages, such as "images".
    """
    size, shard, expert = run.parallel.data, run.parallel.shard, run.parallel.expert
    with_data = str(run.parallel)
    check(
        run.batch % (run.split * size) == 0,
        f"batch={run.batch} {rows} in split={run.split} micro-batches cannot be divided among "
        f"parallel.data={size} processes; use a batch that is a multiple of {run.split * size}, "
        "or another split",
    )
    ema = getattr(run, "ema", None)
    check(
        ema is None or run.parallel.save == "whole",
        f"ema={ema} is saved as a model of its own; use parallel.save=whole",
    )
    if run.parallel.processes == 1:
        return
    check(
        run.model.num_experts % expert == 0,
        f"parallel.expert={expert} does not divide num_experts={run.model.num_experts}; each "
        "process holds the same number of experts",
    )
    check(not run.graph, f"graph=true replays the updates of one process; with {with_data} omit it")
    check(
        not run.compile,
        f"compile=true has not been tried with several processes; with {with_data} omit it",
    )
    check(
        getattr(run, "ema", None) is None or (shard == "ddp" and expert == 1),
        f"ema={getattr(run, 'ema', None)} averages whole weights, and with parallel.shard={shard} "
        f"parallel.expert={expert} a process has parts of them; use ddp and 1",
    )
    check(
        ":" not in run.device and run.device != "mps",
        f"device={run.device} is one device, and {with_data} processes need one each; give "
        f"device={run.device.partition(':')[0].replace('mps', 'cpu')}",
    )


def check_pipeline(run: ParallelRun, *, blocks: int) -> None:
    """Check that a model of so many blocks can be trained by the run's pipeline, if it has one."""
    parallel, split = run.parallel, run.split
    processes, stages = parallel.pipeline, parallel.stages
    if processes == 1:
        check(
            parallel.schedule == "1f1b",
            f"parallel.schedule={parallel.schedule} orders the work of a pipeline; give "
            "parallel.pipeline, or leave it out",
        )
        return
    with_pipeline = f"parallel.pipeline={processes}"
    check(
        blocks >= stages,
        f"{with_pipeline} with parallel.schedule={parallel.schedule} needs a block for each of "
        f"{stages} stages, and the model has {blocks}",
    )
    rounds = max(1, split // processes)
    check(
        split >= processes and (parallel.schedule == "1f1b" or split % rounds == 0),
        f"split={split} micro-batches do not fill {with_pipeline} with "
        f"parallel.schedule={parallel.schedule}; use a multiple of {processes}",
    )
    check(
        parallel.shard == "ddp",
        f"parallel.shard={parallel.shard} shards whole models, not stages; with {with_pipeline} "
        "use parallel.shard=ddp",
    )
    check(
        parallel.expert == 1,
        f"parallel.expert={parallel.expert} has not been tried with stages; with {with_pipeline} "
        "omit it",
    )


def refuse_pipeline(parallel: ParallelConfig) -> None:
    """Raise a UserError if images shall be trained by a pipeline."""
    check(
        (parallel.pipeline, parallel.schedule) == (1, "1f1b"),
        f"parallel.pipeline={parallel.pipeline} cuts decoders of text; backbones of images, whose "
        "widths change between blocks, train with parallel.data alone",
    )
