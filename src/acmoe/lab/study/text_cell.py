"""A cell that trains a language model and scores it, clean and contaminated."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from rich.console import Console

from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.language import language_router
from acmoe.config.text.train import RunConfig
from acmoe.data.text.arrays import Tokens
from acmoe.data.text.contaminate import contaminate
from acmoe.data.text.corpus import Corpus
from acmoe.evaluate.language import Score, check_vocabulary, metric_of, score_stream, value_of
from acmoe.evaluate.run import open_corpus, open_run
from acmoe.evaluate.statistics import own_statistics, using_statistics
from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.follow import course_metrics, curve_of, follow
from acmoe.lab.study.outcome import News, Outcome, routing_metrics
from acmoe.lab.study.pairing import pair_with_plain
from acmoe.lab.study.scale_statistics import model_scale_statistics
from acmoe.models.text.decoder import LanguageModel
from acmoe.runtime import pick_device, seeded
from acmoe.train.finetune import FinetuneReport, finetune
from acmoe.train.journal import Journal
from acmoe.train.resume import save_run
from acmoe.train.run_folder import claim, keep_vocabulary
from acmoe.train.step import Trainer


def run_text(cell: Cell, folder: Path, news: News) -> Outcome:
    """Train in the folder, which is the caller's to throw away."""
    config, tests = cast(RunConfig, cell.config), cast(TextTests, cell.tests)
    device, corpus = pick_device(config.device), open_corpus(config.data)
    check_vocabulary(config.model.vocab_size, corpus)
    metric, valid = metric_of(corpus), corpus["valid"][: config.eval_tokens]
    with claim(folder, config), seeded(config.seed, device):
        keep_vocabulary(corpus.vocabulary, folder)
        trainer, journal = Trainer(config, corpus, device), Journal(folder, metric)
        plain = language_router("smoe", config.model)
        pair_with_plain(trainer.model, config.model, plain, config.seed)
        store = follow(
            trainer,
            journal,
            folder,
            steps=config.steps,
            validate=partial(trainer.validate, valid),
            news=news,
        )
        if tests.tasks:
            save_run(store, config.steps, trainer, journal, corpus)
    figure = metric.replace(" ", "_")
    curve = curve_of(folder, "valid", figure)
    scales = model_scale_statistics(trainer.model)
    metrics = course_metrics(trainer, journal, folder, curve, scales, unit="tokens")
    scored, details = _scored(trainer.model, corpus, tests, config, cell.seed)
    tasks = _finetuned(folder, tests, config, news)
    metrics |= scored | {task.task: task.test_accuracy for task in tasks}
    return Outcome(
        metrics=metrics,
        curves={"valid": curve, "train_loss": curve_of(folder, "train", "loss")},
        details={
            **details,
            "scale": [scale._asdict() for scale in scales],
            "metric": metric,
            "tasks": [replace(task, folder="").to_json() for task in tasks],
        },
    )


def _scored(
    model: LanguageModel, corpus: Corpus, tests: TextTests, config: RunConfig, seed: int
) -> tuple[dict[str, float], dict[str, object]]:
    """Every text in every mode, and what the routers did on the clean test text."""
    metric = metric_of(corpus)
    metrics: dict[str, float] = {}
    details: dict[str, object] = {}
    score = partial(
        score_stream,
        model,
        batch=tests.rows,
        block=config.model.block,
        precision=config.precision,
        routing=True,
    )
    for mode in (None, *_further_modes(model, tests)):
        suffix = "" if mode is None else f"_{mode}"
        with using_statistics(model, mode) as used:
            for name, inputs, targets in _texts(corpus, tests, seed):
                found: Score = score(inputs[: tests.tokens], targets[: tests.tokens])
                metrics[f"{name}{suffix}"] = value_of(found.loss, metric)
                if mode is None and name == "test":
                    metrics |= routing_metrics(found.layers)
                    details["layers"] = [asdict(layer) for layer in found.layers]
                    details["scored"] = {
                        "statistics": used,
                        "rows": tests.rows,
                        "block": config.model.block,
                        "tokens": found.tokens,
                    }
    return metrics, details


def _further_modes(model: LanguageModel, tests: TextTests) -> tuple[str, ...]:
    """What the paper trains with, batch statistics, looks ahead; the same weights without that."""
    return tests.statistics if own_statistics(model) == "batch" else ()


def _texts(corpus: Corpus, tests: TextTests, seed: int) -> Iterator[tuple[str, Tokens, Tokens]]:
    """(name, inputs, targets); a seed has one corrupted text, the same for all conditions."""
    yield "test", corpus["test"], corpus["test"]
    corrupted = contaminate(corpus, "test", ContaminationConfig(seed=seed))
    yield "contaminated", corrupted.inputs, corrupted.targets
    for name, file in tests.others:
        stream: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        yield name, stream, stream


def _finetuned(
    folder: Path, tests: TextTests, config: RunConfig, news: News
) -> list[FinetuneReport]:
    """Each task from the weights after the last step of pretraining."""
    found = []
    for task in tests.tasks:
        news(f"finetuning on {task.task}")
        report = finetune(
            open_run(folder),
            replace(task, which="last", seed=config.seed, device=config.device),
            Path(tests.task_folder) / task.task,
            checkpoints=False,
            console=Console(quiet=True),
        )
        found.append(report)
    return found
