"""Training updates of a language model on streams of text.

B streams, L positions of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from acmoe.config.text.language import with_vocabulary
from acmoe.config.text.train import RunConfig
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.loader import Batch, TrainingBatches
from acmoe.data.transfer import to_device
from acmoe.distributed.parallelize import parallelize
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import check
from acmoe.evaluate.language import (
    check_vocabulary,
    deals_rows,
    score_stream,
    statistics_modes,
)
from acmoe.evaluate.language_report import Score, metric_of
from acmoe.evaluate.lookahead import lookahead_in_training
from acmoe.evaluate.run import open_corpus
from acmoe.fast.memory import StaticMemory
from acmoe.fast.text import memory_dtype
from acmoe.models.registry import build_model
from acmoe.models.text.decoder import LanguageModel, LanguageOutput
from acmoe.models.text.memory import StreamMemory
from acmoe.routing.baselines.stable import freeze_stable_routers
from acmoe.routing.process_group import measuring_alone
from acmoe.runtime import autocast
from acmoe.storage.shards import Stored
from acmoe.train.metrics_log import MetricsLog
from acmoe.train.text.memory import (
    resplit,
    saved_memory,
    saved_split,
    stored_streams,
    stream_tensors,
)
from acmoe.train.trainer import Trainer, eager
from acmoe.train.update import Update

STABLE_STAGE_ONE = 10  # StableMoE learns its routing in a tenth of the steps, at least in one


class TextValidation(NamedTuple):
    """A score of the validation split, and the settings it depends on."""

    loss: float  # mean nats per token
    tokens: int
    statistics: str
    batch: int
    block: int


class TextTrainer(Trainer):
    """Updates of a language model, with the attention memory of each micro-batch's streams."""

    config: RunConfig
    model: LanguageModel
    batches: TrainingBatches
    recent: list[Batch]

    def __init__(
        self, config: RunConfig, corpus: Corpus, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self.corpus = corpus
        self.memories: list[StreamMemory | None] = [None] * config.split
        self.places: dict[int, StaticMemory] = {}  # by micro-batch; only where CUDA graphs run
        model, router_sgd = self.build(config, device, ranks)
        super().__init__(
            config,
            device,
            model,
            TrainingBatches(
                corpus["train"],
                batch=config.batch,
                block=config.model.block,
                seed=config.seed,
                rank=ranks.data_rank,
                world_size=ranks.data_size,
                split=config.split,
            ),
            schedule=config,
            router_sgd=router_sgd,
            ranks=ranks,
        )

    def build(
        self, config: RunConfig, device: torch.device, ranks: Ranks
    ) -> tuple[nn.Module, float | None]:
        """Return the model, and the learning rate of SGD on its routers, None for Adam."""
        assert config.parallel.pipeline == 1 or ranks.mesh is None, (
            "a PipelineTrainer trains stages"
        )
        return new_model(config), config.router_sgd

    @property
    def notes(self) -> Sequence[str]:
        """Say where the routing depends on later tokens."""
        return lookahead_in_training(self.config.model.router)

    @property
    def per_step(self) -> int:
        """The number of tokens in an update."""
        return self.config.tokens_per_step

    def update(self, step: int, *, record: bool) -> Update:
        """Take an optimizer step; freeze StableMoE's routers at the end of their first stage."""
        if step == max(1, self.config.steps // STABLE_STAGE_ONE) + 1:
            frozen = freeze_stable_routers(self.model)
            if frozen and self.graph is not None:
                self.graph.forget()  # graphs captured so far train the routers
            if frozen:  # DDP would wait for the gradients of the routers
                self.replica = parallelize(self.model, self.ranks, self.config.parallel)
        return super().update(step, record=record)

    def load_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (B, L) tokens and targets; a new pass over the data starts without memory."""
        if batch.reset:
            self.memories = [None] * self.config.split
        return to_device(batch.tokens, self.device), to_device(batch.targets, self.device)

    def forward(
        self, part: int, inputs: Tensor, targets: Tensor, *, record: bool
    ) -> LanguageOutput:
        """Run the model on the micro-batch's tokens and the memory of its streams."""
        memory = self.memories[part]
        # Recording adds hooks to modules, and streams without full memory have other shapes. Each
        # would compile the blocks again, and the compiler gives up after a few times.
        with (
            eager(self.config.compile and (record or not self._is_full(memory))),
            autocast(self.config.precision, self.device),
        ):
            out = self.replica(inputs, targets, memory=memory, return_routings=record)
        return cast(LanguageOutput, out)

    def accumulate(
        self, part: int, inputs: Tensor, targets: Tensor, *, record: bool
    ) -> LanguageOutput:
        """Run forward and backward, then keep the memory of the streams for their next block."""
        out = cast(LanguageOutput, super().accumulate(part, inputs, targets, record=record))
        self._store_memory(part, out.memory)
        return out

    def has_static_shapes(self) -> bool:
        """Return True once the memory of every stream has its full length."""
        return all(map(self._is_full, self.memories))

    def _is_full(self, memory: StreamMemory | None) -> bool:
        return memory is not None and memory.hidden[0].shape[1] == self.config.model.span

    def _store_memory(self, part: int, memory: StreamMemory) -> None:
        """Keep a micro-batch's memory; where CUDA graphs run, full memory has a fixed address."""
        if self.graph is not None and self._is_full(memory):
            if part not in self.places:
                with autocast(self.config.precision, self.device):
                    dtype = memory_dtype(self.model)  # a checkpoint may hold a wider one
                config = self.config.model
                length = config.block if config.norm == "post" else 0
                self.places[part] = StaticMemory(memory, length, dtype)
            memory = self.places[part].hold(memory)
        self.memories[part] = memory

    @property
    def depths(self) -> Sequence[int]:
        """The depths of the blocks of this process."""
        return range(len(self.model.blocks))

    def state_tensors(self) -> dict[str, Tensor]:
        """Add the streams' memory: `memory/MICRO-BATCH/BLOCK`, `moments/MICRO-BATCH/BLOCK/NAME`.

        The streams of a micro-batch on all processes are those of the micro-batch of one process.
        """
        join = self.ranks.concatenate
        saved = stream_tensors(self.memories, self.depths)
        return super().state_tensors() | {name: join(rows) for name, rows in saved}

    def shards(self) -> dict[str, Tensor]:
        """Add the memory of this process's streams."""
        saved = stream_tensors(self.memories, self.depths)
        memory = {name: self.ranks.sharded(rows) for name, rows in saved}
        return super().shards() | memory

    def empty_shards(self, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
        """Add the streams' memory: all of it where it was saved with another `split`."""
        memory = stored_streams(stored, self.depths)
        ranks = self.ranks if saved_split(memory) == self.config.split else ALONE
        return super().empty_shards(stored) | {
            name: ranks.empty(one.shape, one.dtype, self.device) for name, one in memory.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the streams' memory as well."""
        super().load_state_tensors(tensors)
        tensors = resplit(tensors, self.config.split)
        for part in range(self.config.split):
            self._store_memory(part, saved_memory(tensors, part, self.depths, self._own_rows))

    def _own_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of this process's streams, on its device."""
        return self.ranks.part(rows).to(self.device)

    @torch.no_grad()
    def replay(self, batch: Batch) -> None:
        """Run the model on a batch again, without memory."""
        with autocast(self.config.precision, self.device):
            self.model(batch.tokens.to(self.device), batch.targets.to(self.device))

    def validate(self) -> TextValidation:
        """Score the first `eval_tokens` of the validation split as an evaluation would."""
        batch, block = self.config.eval_batch, self.config.model.block
        stream = self.corpus["valid"][: self.config.eval_tokens]
        # Blocks with padding and without memory have shapes that are not worth compiling for.
        mode = statistics_modes(self.model, ())[0]
        dealt = deals_rows(batch, mode, self.ranks.data_size)
        score_all = partial(
            score_stream,
            self.model,
            stream,
            batch=batch,
            block=block,
            precision=self.config.precision,
        )
        with eager(self.config.compile), measuring_alone(self.model):
            score = self.score(score_all, dealt=dealt)
        return TextValidation(score.loss, score.tokens, mode, batch, block)

    def score(self, score_all: Callable[..., Score], *, dealt: bool) -> Score:
        """Call `score_all(ranks=...)`; dealt: each process scores its share of the rows."""
        return score_all(ranks=self.ranks if dealt else ALONE)

    def metrics_log(self, folder: Path) -> MetricsLog:
        """Make a log of perplexity, or of bits per byte, as the corpus has it."""
        return MetricsLog(folder, metric_of(self.corpus))

    def data_checksum(self) -> dict[str, str]:
        """Return the checksum of the training tokens."""
        return {"corpus_sha256": self.corpus.manifest.splits["train"].sha256}

    def check_data(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError where the checkpoint was trained on other tokens."""
        check(
            state["corpus_sha256"] == self.data_checksum()["corpus_sha256"],
            f"{self.corpus.folder} is not the corpus this run was begun with (another checksum); "
            "prepare that one again, or choose another run folder",
        )


def new_model(config: RunConfig) -> LanguageModel:
    """Build the model of a run on the CPU."""
    router = with_vocabulary(config.model.router, config.model.vocab_size)
    return cast(LanguageModel, build_model(replace(config.model, router=router)))


def checked_corpus(config: RunConfig) -> Corpus:
    """Open the run's corpus, and check that the model's vocabulary and the validation fit it."""
    corpus = open_corpus(config.data)
    check_vocabulary(config.model.vocab_size, corpus)
    predictions = len(corpus["valid"][: config.eval_tokens]) - 1
    check(
        predictions >= config.eval_batch,
        f"eval_batch={config.eval_batch} rows need a prediction each, and the validation text of "
        f"{corpus.title} has {predictions:,}; lower eval_batch",
    )
    return corpus
