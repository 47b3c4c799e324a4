"""One optimizer update, shared by text and image training, and everything it changes.

`TextTrainer` (text/) and `ImageTrainer` (images.py) feed the update: they load batches, run the
model on a micro-batch, and score the validation split.

B rows of a batch (streams of text, or images), E experts.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acmoe.config.images.train import VisionRunConfig
from acmoe.config.text.train import RunConfig
from acmoe.data.seeding import derive_seed
from acmoe.distributed.parallelize import averaging, parallelize
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.distributed.whole import load_whole_state, whole_model
from acmoe.errors import check
from acmoe.fast.compiled import compile_blocks
from acmoe.models.checkpoint import MODEL, flat_state, nested_state
from acmoe.models.registry import build_model
from acmoe.routing.process_group import set_statistics_group
from acmoe.storage.shards import Stored
from acmoe.train.ema import WeightAverage
from acmoe.train.graph import StepGraph, make_capturable
from acmoe.train.metrics_log import MetricsLog, Score
from acmoe.train.optim import (
    Schedule,
    adam,
    empty_optimizer_shards,
    is_matrix,
    learning_rate,
    optimizer_shards,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from acmoe.train.rng import own_rng, restore_rng, rng_tensors
from acmoe.train.update import Output, Update, expert_loads, mean, take_step


class Batches(Protocol):
    """An endless iterator over training batches whose position can be saved and restored."""

    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class Trainer(ABC):
    """A model, its optimizer and its training batches; `update` takes one optimizer step.

    `recent` holds the batches since the training loop last checked that the losses are finite; the
    error report runs the first bad one again.
    """

    config: RunConfig | VisionRunConfig
    model: nn.Module
    batches: Batches
    recent: list[Any]

    def __init__(
        self,
        config: RunConfig | VisionRunConfig,
        device: torch.device,
        model: nn.Module,
        batches: Batches,
        *,
        schedule: Schedule,
        decays: Callable[[str, nn.Parameter], bool] = is_matrix,
        router_sgd: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        _check_ranks(config, ranks)
        self.config, self.device, self.batches, self.schedule = config, device, batches, schedule
        self.ranks = ranks
        self.model = model.to(device).train()
        self.replica = parallelize(self.model, ranks, config.parallel)  # called in training
        if not ranks.first:  # all drew the same weights; now each draws dropout of its own
            torch.manual_seed(derive_seed(config.seed, "rank", ranks.rank))
        self.optimizer = adam(
            self.model,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            decays=decays,
            router_sgd=router_sgd,
        )
        self.inputs: tuple[Tensor, Tensor] | None = None  # model inputs and targets of the update
        self.recent = []
        self.average: WeightAverage | None = None  # averages the weights after every step
        self.graph: StepGraph | None = None
        if config.graph:
            make_capturable(self.optimizer, device)
            self.graph = StepGraph(self._step)
        if config.compile:
            compile_blocks(self.model)

    @property
    def steps(self) -> int:
        """The number of updates in the whole run."""
        return self.schedule.steps

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the log that say what a user should know of the run's settings."""
        return ()

    @property
    @abstractmethod
    def per_step(self) -> int:
        """The number of tokens or images in an update, of all processes."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 1."""
        return learning_rate(self.schedule, step)

    def update(self, step: int, *, record: bool) -> Update:
        """Load the next batch and take an optimizer step; the host never waits for the device.

        With `record`, the returned update holds the expert loads of every MoE layer.
        """
        batch = next(self.batches)
        self.recent.append(batch)
        set_learning_rate(self.optimizer, self.learning_rate(step))
        inputs, targets = self.load_batch(batch)
        if self.graph is None or not self.has_static_shapes():
            self.inputs = inputs, targets
            return self._step(record)
        self.inputs = self.graph.hold("inputs", inputs), self.graph.hold("targets", targets)
        return self.graph(record)

    def _step(self, record: bool) -> Update:
        """Take an optimizer step on `inputs`. A CUDA graph may capture it: device work only."""
        outputs = self.run_micro_batches(record)
        loss, aux_loss = mean([out.loss for out in outputs]), mean([o.aux_loss for o in outputs])
        if self.ranks.size > 1:
            # A value that is not finite on one process is not finite in the sum: all skip the step.
            # In a pipeline the last stage has the losses, and the others have zeros.
            loss, aux_loss = self.ranks.sum(torch.stack([loss, aux_loss])) / self.ranks.data_size
        finite = self.take_step((loss + aux_loss).isfinite())
        if self.average is not None:
            self.average.update()
        loads = self.loads(outputs) if record else ()
        if loads:
            loads = self.ranks.sum(torch.stack(loads)).unbind()
        return Update(loss, aux_loss, finite, loads)

    def run_micro_batches(self, record: bool) -> Sequence[Output]:
        """Add the gradients of all micro-batches of `inputs`, and return their outputs."""
        assert self.inputs is not None
        outputs = []
        parts = zip(*(tensor.chunk(self.config.split) for tensor in self.inputs), strict=True)
        for part, (inputs, targets) in enumerate(parts):
            with averaging(self.replica, part == self.config.split - 1):
                outputs.append(self.accumulate(part, inputs, targets, record=record))
        return outputs

    def loads(self, outputs: Sequence[Output]) -> tuple[Tensor, ...]:
        """Return (E,) routed tokens of this process for every MoE layer."""
        return expert_loads([out.routings or () for out in outputs], self.config.model.num_experts)

    def take_step(self, finite: Tensor) -> Tensor:
        """Update the weights if the losses are finite; return () whether the update was."""
        return take_step(self.model, self.optimizer, clip=self.config.clip, finite=finite)

    def accumulate(self, part: int, inputs: Tensor, targets: Tensor, *, record: bool) -> Output:
        """Run forward and backward of micro-batch `part`, which adds to the gradients."""
        out = self.forward(part, inputs, targets, record=record)
        assert out.loss is not None
        ((out.loss + out.aux_loss) / self.config.split).backward()  # type: ignore[no-untyped-call]
        return out

    def has_static_shapes(self) -> bool:
        """Return True when this and all later updates have the same tensor shapes."""
        return True

    def whole_model(self) -> nn.Module:
        """Return the model as it is saved, with whole tensors. All processes must call it."""
        return whole_model(self.model, lambda: build_model(self.model.config))

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Load the state_dict of the model that `whole_model` returned."""
        load_whole_state(self.model, state)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that an update changes, except the model's, of all processes.

        All processes must call it.
        """
        return optimizer_tensors(self.optimizer, self.model) | rng_tensors(self.device, self.ranks)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned."""
        restore_optimizer(self.optimizer, self.model, tensors)
        restore_rng(tensors, self.device, self.ranks)

    def shards(self) -> dict[str, Tensor]:
        """Return the model's tensors and those of `state_tensors` as this process has them.

        The shards of all processes together are the checkpoint: DTensors where they are parts of
        one tensor.
        """
        model = {MODEL + name: value for name, value in flat_state(self.model.state_dict()).items()}
        return (
            model | optimizer_shards(self.optimizer, self.model) | own_rng(self.device, self.ranks)
        )

    def empty_shards(self, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
        """Return uninitialised tensors into which this process loads its part of a checkpoint.

        stored: the shapes and dtypes in the checkpoint, which another number of processes may have
        written.
        """
        model = {
            MODEL + name: torch.empty_like(value)
            for name, value in flat_state(self.model.state_dict()).items()
        }
        rng = {
            name: torch.empty(stored[name].shape, dtype=stored[name].dtype)
            for name in own_rng(self.device, self.ranks)
            if name in stored
        }
        return model | empty_optimizer_shards(self.model, stored) | rng

    def load_shards(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `empty_shards` returned, filled."""
        model = {
            name.removeprefix(MODEL): value
            for name, value in tensors.items()
            if name.startswith(MODEL)
        }
        self.model.load_state_dict(nested_state(model))
        self.load_state_tensors(tensors)

    def close(self) -> None:
        """Release the memory of captured CUDA graphs and, in subclasses, of data readers.

        The model leaves the group of its statistics, so that it asks no other process for any while
        it is still in memory.
        """
        self.graph, self.inputs = None, None
        if self.ranks.mesh is not None:
            set_statistics_group(self.model, None)

    @abstractmethod
    def load_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the model inputs and targets of a batch on the device, each with B rows."""

    @abstractmethod
    def forward(self, part: int, inputs: Tensor, targets: Tensor, *, record: bool) -> Output:
        """Run the model on micro-batch `part`; with `record` the output holds its routings."""

    @abstractmethod
    def replay(self, batch: Any) -> None:
        """Run the model on a batch again, without gradients, to find where a NaN begins."""

    @abstractmethod
    def validate(self) -> Score:
        """Score the validation split; the training state and the random streams do not change."""

    @abstractmethod
    def metrics_log(self, folder: Path) -> MetricsLog:
        """Make the metrics log of such a run in `folder`."""

    @abstractmethod
    def data_checksum(self) -> dict[str, str]:
        """Return the field of state.json that tells this training data from any other."""

    @abstractmethod
    def check_data(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError where a checkpoint's state comes from other training data."""


def _check_ranks(config: RunConfig | VisionRunConfig, ranks: Ranks) -> None:
    check(
        config.parallel.processes == ranks.size,
        f"{config.parallel}, but {ranks.size} process trains here; only `acmoe train` uses several",
    )
    check(
        not config.graph or ranks.mesh is None,
        "graph=true replays the updates of one process; under torchrun omit it",
    )


def eager(enabled: bool) -> contextlib.AbstractContextManager[object]:
    """Run compiled blocks uncompiled inside `with`, if enabled."""
    return torch.compiler.set_stance("force_eager") if enabled else contextlib.nullcontext()
