"""One optimizer update, and everything it changes.

B streams, L positions of a block, E experts.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from acmoe.config.text.language import language_router
from acmoe.config.text.train import RunConfig
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.loader import Batch, TrainingBatches
from acmoe.evaluate.language import score_stream, statistics_modes
from acmoe.models.compiled import compile_blocks
from acmoe.models.registry import build_model
from acmoe.models.text.decoder import LanguageModel, LanguageOutput, Memory
from acmoe.routing.losses import load
from acmoe.routing.stable import StableRouter
from acmoe.routing.state import Routing
from acmoe.routing.step import fold_statistics
from acmoe.runtime import autocast
from acmoe.train.graph import StepGraph, make_capturable
from acmoe.train.memory import HeldMemory
from acmoe.train.optim import adam, learning_rate, set_learning_rate
from acmoe.train.update import Update

STABLE_STAGE_ONE = 10  # StableMoE learns its routing in the first tenth of the steps


class Validation(NamedTuple):
    """A score of the validation split, with what it depends on."""

    loss: float  # mean nats per token
    tokens: int
    statistics: str
    batch: int
    block: int


class Trainer:
    """The model, its optimizer, the place in the data and each stream's memory.

    `recent` are the batches since somebody last looked whether the losses are finite.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device) -> None:
        self.config, self.device = config, device
        resolved = replace(config.model, router=language_router(config.model.router, config.model))
        self.model = cast(LanguageModel, build_model(resolved)).to(device).train()
        self.optimizer = adam(
            self.model,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            router_sgd=config.router_sgd,
        )
        self.batches = TrainingBatches(
            corpus["train"], batch=config.batch, block=config.model.block, seed=config.seed
        )
        self.memories: list[Memory | None] = [None] * config.split
        self.places: dict[int, HeldMemory] = {}  # of each micro-batch's memory, where graphs run
        self.inputs: list[tuple[Tensor, Tensor]] = []  # tokens and targets of each micro-batch
        self.recent: list[Batch] = []
        self.graph: StepGraph | None = None
        if config.graph:
            make_capturable(self.optimizer, device)
            self.graph = StepGraph(self._step)
        if config.compile:
            compile_blocks(self.model)

    def update(self, step: int, *, record: bool) -> Update:
        """Read a batch, take a step. Nothing here waits for the device."""
        if step == self.config.steps // STABLE_STAGE_ONE + 1 and freeze_stable_routers(self.model):
            self._capture_anew()
        batch = next(self.batches)
        self.recent.append(batch)
        if batch.reset:
            self.memories = [None] * self.config.split
        set_learning_rate(self.optimizer, self.learning_rate(step))
        parts = zip(self._parts(batch.tokens), self._parts(batch.targets), strict=True)
        if self.graph is None or not all(map(self._full, self.memories)):
            self.inputs = list(parts)
            return self._step(record)
        hold = self.graph.hold
        self.inputs = [
            (hold(("tokens", part), tokens_BL), hold(("targets", part), targets_BL))
            for part, (tokens_BL, targets_BL) in enumerate(parts)
        ]
        self.memories = [self._held(part, memory) for part, memory in enumerate(self.memories)]
        return self.graph(record)

    def _step(self, record: bool) -> Update:
        """An update by `inputs` and `memories`. Inside a graph it may only touch the device."""
        outputs = []
        for part, (tokens_BL, targets_BL) in enumerate(self.inputs):
            out = self._forward(tokens_BL, targets_BL, self.memories[part], record=record)
            assert out.loss is not None
            ((out.loss + out.aux_loss) / self.config.split).backward()  # type: ignore[no-untyped-call]
            self.memories[part] = self._held(part, out.memory)
            outputs.append(out)
        loss = mean([out.loss for out in outputs])
        aux_loss = mean([out.aux_loss for out in outputs])
        sound = take_step(
            self.model,
            self.optimizer,
            clip=self.config.clip,
            sound=(loss + aux_loss).isfinite(),
        )
        routings = [out.routings or () for out in outputs]
        return Update(loss, aux_loss, sound, summed_loads(routings, self.config.model.num_experts))

    def _full(self, memory: Memory | None) -> bool:
        """Whether streams have filled their window, so that no later step has another shape."""
        return memory is not None and memory.hidden[0].shape[1] == self.config.model.span

    def _held(self, part: int, memory: Memory | None) -> Memory | None:
        """The memory, where graphs find it."""
        if self.graph is None or memory is None or not self._full(memory):
            return memory
        if part not in self.places:
            with autocast(self.config.precision, self.device):
                dtype = self.model.memory_dtype  # a checkpoint may hold a wider one
            config = self.config.model
            length = config.block if config.norm == "post" else 0
            self.places[part] = HeldMemory(memory, length, dtype)
        return self.places[part].hold(memory)

    def _capture_anew(self) -> None:
        if self.graph is not None:
            self.graph.forget()

    @property
    def per_step(self) -> int:
        """Tokens of an update."""
        return self.config.tokens_per_step

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.config, step)

    @torch.no_grad()
    def replay(self, batch: Batch) -> None:
        """Read a batch again, without memory."""
        with autocast(self.config.precision, self.device):
            self.model(batch.tokens.to(self.device), batch.targets.to(self.device))

    def validate(self, stream: Tokens) -> Validation:
        """Score a stream as an evaluation would; training goes on as if nothing had happened."""
        batch, block = self.config.eval_batch, self.config.model.block
        # Blocks with padding and without memory have shapes that are not worth compiling for.
        with eager(self.config.compile):
            score = score_stream(
                self.model, stream, batch=batch, block=block, precision=self.config.precision
            )
        mode = statistics_modes(self.model, ())[0]
        return Validation(score.loss, score.tokens, mode, batch, block)

    def _parts(self, ids: Tensor) -> tuple[Tensor, ...]:
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        return ids.chunk(self.config.split)

    def _forward(
        self, tokens_BL: Tensor, targets_BL: Tensor, memory: Memory | None, *, record: bool
    ) -> LanguageOutput:
        # Recording hangs hooks on modules, and streams begin with shapes of their own: blocks would
        # be compiled again for each, and beyond a few such times no more.
        with (
            eager(self.config.compile and (record or not self._full(memory))),
            autocast(self.config.precision, self.device),
        ):
            out = self.model(tokens_BL, targets_BL, memory=memory, return_routings=record)
        return cast(LanguageOutput, out)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None,
    sound: Tensor,
) -> Tensor:
    """Update the weights by their gradients, and once the running statistics; whether it was sound.

    `sound` tells whether the losses are finite; the gradient must be too, where it is clipped.
    """
    if clip is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        sound = sound & norm.isfinite()
    # The fused kernel skips its update where this is 1: weights stay those that gave the first
    # bad loss, and can be examined when the host next looks.
    optimizer.found_inf = (~sound).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    fold_statistics(model)
    return sound


def summed_loads(parts: Sequence[Sequence[Routing]], num_experts: int) -> tuple[Tensor, ...]:
    """Routed tokens at each expert of every MoE layer, over the micro-batches."""
    return tuple(
        torch.stack([load(routing.expert_ids, num_experts) for routing in layer]).sum(0)
        for layer in zip(*parts, strict=True)
    )


def eager(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, compiled blocks run uncompiled, if so wanted."""
    return torch.compiler.set_stance("force_eager") if wanted else contextlib.nullcontext()


def freeze_stable_routers(model: LanguageModel) -> bool:
    """Whether there was one."""
    routers = [module for module in model.modules() if isinstance(module, StableRouter)]
    for router in routers:
        router.freeze()
    return bool(routers)


def mean(values: list[Tensor | None]) -> Tensor:
    return torch.stack([value.detach() for value in values if value is not None]).mean()
