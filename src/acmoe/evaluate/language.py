"""Perplexity or bits per byte of a language model.

Every token of a split is scored once, including end-of-line tokens.

B rows, L positions of a block, T = B * L tokens, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.updates import Precision
from acmoe.data.progress import Progress, silent
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.contaminate import contaminate, settled
from acmoe.data.text.corpus import Corpus
from acmoe.data.text.loader import EvaluationBatches
from acmoe.data.text.swaps import SwapReport
from acmoe.data.transfer import to_device
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import NonFiniteError, UserError, check
from acmoe.evaluate.finite import REMEDY, naming
from acmoe.evaluate.host_sum import HostSum
from acmoe.evaluate.language_report import Figure, LanguageReport, Score, metric_of
from acmoe.evaluate.routing import RoutingTally
from acmoe.evaluate.run import Run, open_run
from acmoe.evaluate.statistics import NONE, check_statistics, using_statistics
from acmoe.models.text.decoder import LanguageModel, LanguageOutput
from acmoe.models.text.memory import Memory
from acmoe.routing.process_group import measuring_alone
from acmoe.runtime import autocast, evaluating, pick_device, seeded


def evaluate(
    source: Run | LanguageModel | Path | str,
    config: EvaluateConfig | None = None,
    *,
    corpus: Corpus | None = None,
    device: str = "auto",
    progress: Progress = silent,
    ranks: Ranks = ALONE,
) -> LanguageReport:
    """Score a run (a `Run` or its folder) or a model.

    `corpus` defaults to that of the run; it is required for a model. `device` applies to runs only:
    a model is scored on the device it is on. `progress` is called with the text that is scored and
    numbers of tokens. With several `ranks` each process scores its share of the rows where it can
    (`deals_rows`), and all return the same report.
    """
    config = config or EvaluateConfig()
    model, corpus, step, precision = _open(source, config, corpus, device)
    check(
        not config.routing or model.config.num_moe_layers > 0,
        "routing=True, and the model has no MoE layer to measure; leave it out",
    )
    block, metric = config.block or model.config.block, metric_of(corpus)
    texts, swaps = _texts(corpus, config)
    scorer = _Scorer(model, corpus.title, config, block, precision, progress, ranks)
    figures = [
        Figure.of(scorer.score(text, mode), mode, text.contaminated, metric)
        for mode in statistics_modes(model, config.statistics)
        for text in texts
    ]
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
        contamination_config=config.contamination and settled(corpus, config.contamination),
    )


class _Text(NamedTuple):
    """A text to score: its tokens, and the tokens to predict."""

    contaminated: bool
    inputs: Tokens
    targets: Tokens


@dataclass(frozen=True)
class _Scorer:
    """Scores texts of one corpus with the settings of one evaluation."""

    model: LanguageModel
    title: str  # title of the corpus
    config: EvaluateConfig
    block: int
    precision: Precision
    progress: Progress
    ranks: Ranks

    def score(self, text: _Text, mode: str) -> Score:
        """Score a text with the statistics of `mode`; a `NonFiniteError` names both."""
        config, which = self.config, ", contaminated" if text.contaminated else ""
        with (
            using_statistics(self.model, None if mode == NONE else mode),
            naming(f"{self.title}, {config.split}{which}, statistics {mode}"),
            measuring_alone(self.model),
        ):
            return score_stream(
                self.model,
                text.inputs,
                text.targets,
                batch=config.batch,
                block=self.block,
                precision=self.precision,
                routing=config.routing,
                seed=config.seed,
                progress=partial(self.progress, _stage(config, mode, text.contaminated)),
                ranks=self.ranks if deals_rows(config.batch, mode, self.ranks.size) else ALONE,
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
    progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks = ALONE,
) -> Score:
    """Return the mean loss over all predictions of a stream, read in `batch` rows with memory.

    With several `ranks` each process reads its share of the rows, and all return the same score.

    Raises:
        NonFiniteError: the loss of a batch is NaN or infinite.
    """
    device = next(model.parameters()).device
    batches = EvaluationBatches(
        inputs,
        targets=targets,
        batch=batch,
        block=block,
        rank=ranks.rank,
        world_size=ranks.size,
    )
    tally = RoutingTally(len(model.moe_layers()), model.config.num_experts, device)
    nats = HostSum()
    done = 0
    with seeded(seed, device), autocast(precision, device), evaluating(model):
        for out, count, mask in _outputs(model, batches, device, routing):
            assert out.loss is not None
            nats.add(out.loss, count)
            if out.routings is not None:
                tally.add(out.routings, mask)
            done += count
            progress(min(done * ranks.size, batches.predictions), batches.predictions)
    loss = ranks.add(nats.total())[0] / batches.predictions
    _check_finite(ranks.gather(nats.first_bad), len(batches))
    layers = tally.layers(ranks) if routing else ()
    return Score(loss, batches.predictions, layers)


def _check_finite(first_bad: Sequence[int | None], batches: int) -> None:
    """Raise where a process has seen a loss that is not finite; `first_bad` has its batch."""
    bad = [number for number in first_bad if number is not None]
    if bad:
        which = f"batch {min(bad)} of {batches}"
        raise NonFiniteError(f"the loss of {which} is not finite; {REMEDY}")


def _outputs(
    model: LanguageModel, batches: EvaluationBatches, device: torch.device, routing: bool
) -> Iterator[tuple[LanguageOutput, int, Tensor | None]]:
    """Yield the output of each batch, its number of predictions, and its mask if it is padded."""
    memory: Memory | None = None
    for tokens_BL, targets_BL, _, mask_BL in batches:
        assert mask_BL is not None
        count = int(mask_BL.sum())
        # Without padding pass no mask, so that attention can use its fast path.
        mask = None if count == mask_BL.numel() else mask_BL.to(device)
        out = model(
            to_device(tokens_BL, device),
            to_device(targets_BL, device),
            memory=memory,
            token_mask=mask,
            return_routings=routing,
        )
        memory = out.memory
        yield out, count, mask


def deals_rows(batch: int, mode: str, processes: int) -> bool:
    """Return True if `batch` rows can be dealt to processes, each of which scores some of them.

    With batch statistics the rows depend on one another: then every process scores all.
    """
    return batch % processes == 0 and mode != "batch"


def _stage(config: EvaluateConfig, mode: str, contaminated: bool) -> str:
    """Name one pass over the text in a progress report."""
    text = f"contaminated {config.split} text" if contaminated else f"{config.split} text"
    return f"{text}, tokens" if mode == NONE else f"{text}, statistics {mode}, tokens"


def _texts(corpus: Corpus, config: EvaluateConfig) -> tuple[list[_Text], SwapReport | None]:
    """Return the texts to score, and counts of replacements in the contaminated one."""
    clean = _Text(False, corpus[config.split], corpus[config.split])
    if config.contamination is None:
        return [clean], None
    corrupted = contaminate(corpus, config.split, config.contamination)
    return [clean, _Text(True, corrupted.inputs, corrupted.targets)], corrupted.report


def statistics_modes(model: LanguageModel, requested: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statistics modes to score in: those requested, or else the model's own.

    A model without adaptive routers has the single mode "none".
    """
    router = model.config.router
    if not isinstance(router, AdaptiveConfig):
        check(
            not requested,
            f"statistics={', '.join(requested)}: router={router.name!r} takes no statistics; leave "
            "them out",
        )
        return (NONE,)
    check_statistics(model, requested)
    return requested or (router.modes.evaluation,)


def _open(
    source: Run | LanguageModel | Path | str,
    config: EvaluateConfig,
    corpus: Corpus | None,
    device: str,
) -> tuple[LanguageModel, Corpus, int | None, Precision]:
    """Return the model, its corpus, the step of its checkpoint, and the precision to use."""
    if isinstance(source, LanguageModel):
        if corpus is None:
            raise UserError("a bare model has no corpus of its own; pass corpus=load_corpus(...)")
        model, step, precision = source, None, config.precision or "fp32"
    else:
        run = source if isinstance(source, Run) else open_run(source)
        corpus = corpus or run.corpus()
        model = run.model(config.which, device=pick_device(device))
        step = run.step(config.which)
        precision = config.precision or run.config.precision
    check_vocabulary(model.config.vocab_size, corpus)
    return model, corpus, step, precision


def check_vocabulary(vocab_size: int, corpus: Corpus) -> None:
    """Check that model and corpus have vocabularies of the same size."""
    size = corpus.vocabulary.size
    check(
        vocab_size == size,
        f"model.vocab_size={vocab_size}, but {corpus.title} in {corpus.folder} has {size} symbols; "
        f"set model.vocab_size={size}",
    )
