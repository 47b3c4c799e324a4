"""Run a cell that trains a language model and scores it on clean and contaminated text."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.console import Console

from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.language import language_router
from acmoe.config.text.train import RunConfig
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.contaminate import contaminate, contaminate_stream
from acmoe.data.text.corpus import Corpus
from acmoe.errors import NonFiniteError
from acmoe.evaluate.finite import naming
from acmoe.evaluate.language import score_stream
from acmoe.evaluate.language_report import Score, metric_of, value_of
from acmoe.evaluate.run import CHECKPOINTS, open_run
from acmoe.evaluate.statistics import own_statistics, using_statistics
from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.cells.folder import saves
from acmoe.lab.study.cells.long import (
    RoutingTrainer,
    divergence,
    layer_series,
    routing_curves,
    separation_metrics,
    stopped_outcome,
)
from acmoe.lab.study.cells.outcome import Notify, Outcome, routing_metrics
from acmoe.lab.study.cells.pairing import pair_with_plain
from acmoe.lab.study.cells.scale_statistics import model_scale_statistics
from acmoe.lab.study.cells.training import curve_of, train_cell, training_metrics
from acmoe.models.text.decoder import LanguageModel
from acmoe.runtime import pick_device, seeded
from acmoe.train.checkpoint import CheckpointStore
from acmoe.train.finetune import FinetuneReport, finetune
from acmoe.train.health import TrainingStopped
from acmoe.train.metrics_log import MetricsLog
from acmoe.train.run_folder import claim
from acmoe.train.saving import Saver
from acmoe.train.text import TextTrainer, checked_corpus
from acmoe.train.trainer import eager


def run_text(cell: Cell, folder: Path, notify: Notify) -> Outcome:
    """Train in the folder, which the caller removes afterwards, and score the model."""
    config, tests = cast(RunConfig, cell.config), cast(TextTests, cell.tests)
    device, corpus = pick_device(config.device), checked_corpus(config)
    with (
        claim(folder, config, corpus.vocabulary),
        seeded(config.seed, device),
        contextlib.closing(_trainer(config, corpus, device, tests)) as trainer,
    ):
        plain = language_router("smoe", config.model)
        pair_with_plain(trainer.model, config.model, plain, config.seed)
        try:
            store = CheckpointStore(folder / CHECKPOINTS, keep=1) if saves(config) else None
            log = train_cell(trainer, folder, notify, store)
        except TrainingStopped as stopped:
            if tests.divergence is None:
                raise
            return stopped_outcome(folder, config, metric_of(corpus), str(stopped))
        if tests.tasks:
            Saver(CheckpointStore(folder / CHECKPOINTS, keep=1), trainer, log).save(config.steps)
    return _outcome(cell, corpus, trainer, log, notify)


def _outcome(
    cell: Cell, corpus: Corpus, trainer: TextTrainer, log: MetricsLog, notify: Notify
) -> Outcome:
    """Score the trained model, finetune it on the tasks, and gather all figures of the cell."""
    config, tests = cast(RunConfig, cell.config), cast(TextTests, cell.tests)
    folder = log.path.parent
    curve = curve_of(folder, "valid", log.metric.replace(" ", "_"))
    scales = model_scale_statistics(trainer.model)
    metrics = training_metrics(trainer, log, curve, scales)
    if tests.divergence is not None:
        metrics |= divergence(curve_of(folder, "valid", "loss"), tests.divergence)
        metrics["tokens_trained"] = float(config.steps * config.tokens_per_step)
    # Scoring has other shapes, modes and hooks than training: each would be compiled anew.
    try:
        with eager(config.compile):
            scored, details = _scored(trainer.model, corpus, tests, config, cell.seed)
    except NonFiniteError as error:
        if tests.divergence is None:
            raise
        return stopped_outcome(folder, config, metric_of(corpus), str(error))
    tasks = _finetuned(folder, tests, config, notify)
    routing = routing_curves(folder)
    metrics |= scored | {task.task: task.test_accuracy for task in tasks}
    metrics |= separation_metrics(routing)
    return Outcome(
        metrics=metrics,
        curves={
            "valid": curve,
            "train_loss": curve_of(folder, "train", "loss"),
            **routing,
        },
        details={
            **details,
            **layer_series(folder),
            "scale": [scale._asdict() for scale in scales],
            "metric": log.metric,
            "tasks": [replace(task, folder="").to_json() for task in tasks],
        },
    )


def _trainer(
    config: RunConfig, corpus: Corpus, device: torch.device, tests: TextTests
) -> TextTrainer:
    if tests.routing_tokens is None:
        return TextTrainer(config, corpus, device)
    return RoutingTrainer(config, corpus, device, tests.routing_tokens)


def _scored(
    model: LanguageModel, corpus: Corpus, tests: TextTests, config: RunConfig, seed: int
) -> tuple[dict[str, float], dict[str, object]]:
    """Score every text in every statistics mode; add routing measures of the clean test text."""
    metric = metric_of(corpus)
    metrics: dict[str, float] = {}
    details: dict[str, object] = {}
    score = partial(
        score_stream,
        model,
        batch=tests.rows,
        block=config.model.block,
        precision=config.precision,
    )
    for mode in (None, *_further_modes(model, tests)):
        suffix = "" if mode is None else f"_{mode}"
        with using_statistics(model, mode) as used:
            further = _corrupted_others(corpus, tests, seed) if mode is None else ()
            for name, inputs, targets in (*_texts(corpus, tests, seed), *further):
                clean = mode is None and name == "test"
                with naming(f"{name}, statistics {used}"):
                    # Recording changes no loss and takes time, so only this text records.
                    found: Score = score(
                        inputs[: tests.tokens], targets[: tests.tokens], routing=clean
                    )
                metrics[f"{name}{suffix}"] = value_of(found.loss, metric)
                if clean:
                    metrics |= routing_metrics(found.layers)
                    details = _scored_details(found, used, tests, config)
    return metrics, details


def _scored_details(
    found: Score, statistics: str, tests: TextTests, config: RunConfig
) -> dict[str, object]:
    """Return the routing measures of each layer, and the settings that the score depends on."""
    return {
        "layers": [asdict(layer) for layer in found.layers],
        "scored": {
            "statistics": statistics,
            "rows": tests.rows,
            "block": config.model.block,
            "tokens": found.tokens,
        },
    }


def _further_modes(model: LanguageModel, tests: TextTests) -> tuple[str, ...]:
    """Return the statistics modes in which a model of batch statistics is scored as well.

    The paper trains with batch statistics, which look ahead in the text; other modes score the same
    weights without look-ahead.
    """
    return tests.statistics if own_statistics(model) == "batch" else ()


def _texts(corpus: Corpus, tests: TextTests, seed: int) -> Iterator[tuple[str, Tokens, Tokens]]:
    """Yield (name, inputs, targets); all conditions of a seed have the same contaminated text."""
    yield "test", corpus["test"], corpus["test"]
    for rate in (None, *tests.rates):
        contaminated = contaminate(corpus, "test", ContaminationConfig(seed=seed, rate=rate))
        name = "contaminated" if rate is None else f"contaminated {rate:g}"
        yield name, contaminated.inputs, contaminated.targets
    for name, file in tests.others:
        stream: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        yield name, stream, stream


def _corrupted_others(
    corpus: Corpus, tests: TextTests, seed: int
) -> Iterator[tuple[str, Tokens, Tokens]]:
    """Yield the further texts at each rate of contamination, where the study has several rates."""
    for name, file in tests.others if tests.rates else ():
        stream: Tokens = np.load(file, allow_pickle=False)[: tests.tokens]
        for rate in (None, *tests.rates):
            config = ContaminationConfig(seed=seed, rate=rate)
            found = contaminate_stream(corpus, stream, name, config)
            label = f"{name} contaminated" if rate is None else f"{name} contaminated {rate:g}"
            yield label, found.inputs, found.targets


def _finetuned(
    folder: Path, tests: TextTests, config: RunConfig, notify: Notify
) -> list[FinetuneReport]:
    """Finetune on each task, starting from the weights after the last step of pretraining."""
    found = []
    for task in tests.tasks:
        notify(f"finetuning on {task.task}")
        report = finetune(
            open_run(folder),
            replace(task, which="last", seed=config.seed, device=config.device),
            Path(tests.task_folder) / task.task,
            checkpoints=False,
            console=Console(quiet=True),
        )
        found.append(report)
    return found
