"""Perplexity or bits per byte: every token of a split is scored once, end-of-line tokens too.

B rows, L positions of a block, T = B * L tokens, E experts.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from acmoe.config.routing import AdaptiveConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.train import Precision
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.contaminate import contaminate
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.loader import EvaluationBatches
from acmoe.data.text.swaps import SwapReport
from acmoe.errors import UserError, check
from acmoe.evaluate.routing import LayerReport, RoutingTally
from acmoe.evaluate.run import Run, open_run
from acmoe.evaluate.statistics import NONE, using_statistics
from acmoe.models.text.decoder import LanguageModel, Memory
from acmoe.runtime import autocast, pick_device, seeded

Metric = Literal["bits per byte", "perplexity"]


class Score(NamedTuple):
    loss: float  # mean nats per token
    tokens: int  # predictions made
    layers: tuple[LayerReport, ...]  # one per MoE layer, where asked for


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One pass over the split."""

    statistics: str  # mode of the adaptive routers; "none" where there are none
    contaminated: bool
    loss: float  # mean nats per token
    value: float  # the same as the report's metric
    tokens: int
    layers: tuple[LayerReport, ...]

    @classmethod
    def of(cls, score: Score, mode: str, contaminated: bool, metric: Metric) -> "Figure":
        value = value_of(score.loss, metric)
        return cls(statistics=mode, contaminated=contaminated, value=value, **score._asdict())


@dataclass(frozen=True, kw_only=True)
class LanguageReport:
    """What a model scored, with everything the figures depend on."""

    corpus: str
    split: str
    metric: Metric
    batch: int
    block: int
    precision: Precision
    step: int | None  # of the run's checkpoint; None for a bare model
    contamination: SwapReport | None  # what was done to the text; None: nothing
    figures: tuple[Figure, ...]

    def figure(self, *, contaminated: bool = False, statistics: str | None = None) -> Figure:
        """The first figure of that kind."""
        for figure in self.figures:
            if figure.contaminated == contaminated and statistics in (None, figure.statistics):
                return figure
        raise UserError(f"no figure with contaminated={contaminated}, statistics={statistics}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    source: Run | LanguageModel | Path | str,
    config: EvaluateConfig | None = None,
    *,
    corpus: Corpus | None = None,
    device: str = "auto",
) -> LanguageReport:
    """Score a run (or its folder) on its own corpus, or a model, where it is, on the one given.

    `device` is for runs.
    """
    config = config or EvaluateConfig()
    model, corpus, step, precision = _opened(source, config, corpus, device)
    block, metric = config.block or model.config.block, metric_of(corpus)
    streams = [(False, corpus[config.split], corpus[config.split])]
    swaps = None
    if config.contamination is not None:
        corrupted = contaminate(corpus, config.split, config.contamination)
        streams.append((True, corrupted.inputs, corrupted.targets))
        swaps = corrupted.report
    figures = []
    for mode in statistics_modes(model, config.statistics):
        for contaminated, inputs, targets in streams:
            with using_statistics(model, None if mode == NONE else mode):
                score = score_stream(
                    model,
                    inputs,
                    targets,
                    batch=config.batch,
                    block=block,
                    precision=precision,
                    routing=config.routing,
                    seed=config.seed,
                )
            figures.append(Figure.of(score, mode, contaminated, metric))
    return LanguageReport(
        corpus=corpus.title,
        split=config.split,
        metric=metric,
        batch=config.batch,
        block=block,
        precision=precision,
        step=step,
        contamination=swaps,
        figures=tuple(figures),
    )


@torch.no_grad()
def score_stream(
    model: LanguageModel,
    inputs: Tokens,
    targets: Tokens | None = None,
    *,
    batch: int,
    block: int,
    precision: Precision = "fp32",
    routing: bool = False,
    seed: int = 0,
) -> Score:
    """Mean loss over every prediction of a stream, read in `batch` rows with their memory."""
    device = model.embed.weight.device
    batches = EvaluationBatches(inputs, targets=targets, batch=batch, block=block)
    tally = RoutingTally(len(model.moe_layers()), model.config.num_experts, device)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    memory: Memory | None = None
    with seeded(seed, device), autocast(precision, device), _evaluating(model):
        for tokens_BL, targets_BL, _, mask_BL in batches:
            assert mask_BL is not None
            count = int(mask_BL.sum())
            # Without padding no mask is needed, and attention takes its fast path.
            mask = None if count == mask_BL.numel() else mask_BL.to(device)
            out = model(
                tokens_BL.to(device),
                targets_BL.to(device),
                memory=memory,
                token_mask=mask,
                return_routings=routing,
            )
            nats += out.loss.double() * count
            memory = out.memory
            if routing:
                tally.add(out.routings, mask)
    layers = tally.layers() if routing else ()
    return Score(float(nats) / batches.predictions, batches.predictions, layers)


def statistics_modes(model: LanguageModel, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The modes to score in: those asked for, or the model's own; "none" without adaptive ones."""
    router = model.config.router
    if not isinstance(router, AdaptiveConfig):
        check(
            not asked,
            f"statistics={', '.join(asked)}: router={router.name!r} takes no statistics; leave "
            "them out",
        )
        return (NONE,)
    return asked or (router.modes[1],)


def metric_of(corpus: Corpus) -> Metric:
    return "bits per byte" if corpus.kind == "bytes" else "perplexity"


def value_of(loss: float, metric: Metric) -> float:
    """Nats per token as bits, or as the perplexity, kept finite for a hopeless model."""
    return loss / math.log(2) if metric == "bits per byte" else math.exp(min(loss, 700.0))


def _opened(
    source: Run | LanguageModel | Path | str,
    config: EvaluateConfig,
    corpus: Corpus | None,
    device: str,
) -> tuple[LanguageModel, Corpus, int | None, Precision]:
    """The model, its corpus, the step it is from and the precision to use."""
    if isinstance(source, LanguageModel):
        if corpus is None:
            raise UserError("a bare model has no corpus of its own; pass corpus=load_corpus(...)")
        model, step, precision = source, None, config.precision or "fp32"
    else:
        run = source if isinstance(source, Run) else open_run(source)
        corpus = corpus or run.corpus()
        folder = run.checkpoint(config.which)
        model = run.model(config.which, device=pick_device(device))
        step = int(folder.name.split("-")[1])
        precision = config.precision or run.config.precision
    check_vocabulary(model.config.vocab_size, corpus)
    return model, corpus, step, precision


def check_vocabulary(vocab_size: int, corpus: Corpus) -> None:
    """The model's ids are the corpus' ids."""
    size = corpus.vocabulary.size
    check(
        vocab_size == size,
        f"model.vocab_size={vocab_size}, but {corpus.title} in {corpus.folder} has {size} symbols; "
        f"set model.vocab_size={size}",
    )


@contextlib.contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
