"""Run a cell that trains an image classifier, scores it and attacks it."""

import contextlib
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from acmoe.config.images.attack import AttackConfig, eps_text
from acmoe.config.images.data import ImageDataConfig, ImageEvaluateConfig
from acmoe.config.images.presets import vision_router
from acmoe.config.images.train import VisionRunConfig
from acmoe.data.images.load import load_images
from acmoe.data.images.splits import ImageSet, ImageSplits
from acmoe.evaluate.images.accuracy import evaluate_images
from acmoe.evaluate.images.attack import evaluate_attack
from acmoe.lab.study.cell import Cell, ImageTests
from acmoe.lab.study.cells.outcome import Notify, Outcome, routing_metrics
from acmoe.lab.study.cells.pairing import pair_with_plain
from acmoe.lab.study.cells.scale_statistics import model_scale_statistics
from acmoe.lab.study.cells.training import curve_of, train_cell, training_metrics
from acmoe.models.images.classifier import ImageClassifier
from acmoe.runtime import pick_device, seeded
from acmoe.train.images import ImageTrainer, check_images

Scored = tuple[dict[str, float], dict[str, Any]]  # metrics and details of an Outcome


def run_images(cell: Cell, folder: Path, notify: Notify) -> Outcome:
    """Train in the folder, which the caller removes afterwards, then score and attack."""
    config, tests = cast(VisionRunConfig, cell.config), cast(ImageTests, cell.tests)
    device, images = pick_device(config.device), _images(config.data)
    check_images(config, images)
    with (
        seeded(config.seed, device),
        contextlib.closing(ImageTrainer(config, images, device)) as trainer,
    ):
        plain = vision_router("smoe", config.model)
        pair_with_plain(trainer.model, config.model, plain, config.seed)
        log = train_cell(trainer, folder, notify)
    curve = curve_of(folder, "valid", "top1")
    scales = model_scale_statistics(trainer.model)
    metrics = training_metrics(trainer, log, curve, scales)  # reads the peak memory of training
    clean, layers = _scored(trainer.model, images.test, config, tests)
    attacked, attacks = _attacked(trainer.model, images.test, config, tests, notify)
    return Outcome(
        metrics=metrics | clean | attacked,
        curves={"valid": curve, "train_loss": curve_of(folder, "train", "loss")},
        details={**layers, **attacks, "scale": [scale._asdict() for scale in scales]},
    )


def _scored(
    model: ImageClassifier, images: ImageSet, config: VisionRunConfig, tests: ImageTests
) -> Scored:
    """Score the clean test images, and measure their routing."""
    evaluation = ImageEvaluateConfig(
        capacity="model",  # as the paper scores, and all cells so far
        batch=tests.batch,
        limit=tests.images,
        precision=config.precision,
        routing=True,
    )
    device = str(pick_device(config.device))
    report = evaluate_images(model, images, config.data, evaluation, device=device)
    clean = report.figures[0]
    metrics = {"test": clean.top1, "test_loss": clean.loss, **routing_metrics(clean.layers)}
    scored = {"statistics": clean.statistics, "batch": tests.batch, "images": report.images}
    return metrics, {"layers": [asdict(layer) for layer in clean.layers], "scored": scored}


def _attacked(
    model: ImageClassifier,
    images: ImageSet,
    config: VisionRunConfig,
    tests: ImageTests,
    notify: Notify,
) -> Scored:
    """Score the test images under every attack and radius."""
    metrics: dict[str, float] = {}
    reports = []
    for attack in tests.attacks:
        report = evaluate_attack(
            model,
            images,
            config.data,
            attack,
            device=str(pick_device(config.device)),
            progress=lambda stage, done, total: notify(f"{stage} {done} of {total}"),
        )
        for figure in report.figures:
            name = f"{attack_name(attack)} {eps_text(figure.eps)}"
            metrics[name] = figure.top1
            metrics[f"{name} moved"] = fmean(figure.moved)
        reports.append(report.to_json())
    return metrics, {"attacks": reports}


@lru_cache(maxsize=1)
def _images(config: ImageDataConfig) -> ImageSplits:
    """Load images, and keep them for the worker's next cell; Imagenette has half a gigabyte."""
    return load_images(config)


def attack_name(config: AttackConfig) -> str:
    """Return `pgd`, or `pgd-paper` for an attack in normalised space, as in the paper."""
    return config.attack.name + ("-paper" if config.space == "normalized" else "")
