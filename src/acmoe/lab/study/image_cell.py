"""A cell that trains an image classifier, scores it and attacks it."""

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
from acmoe.data.images.splits import ImageSplits
from acmoe.evaluate.attack import evaluate_attack
from acmoe.evaluate.vision import evaluate_images
from acmoe.lab.study.cell import Cell, ImageTests
from acmoe.lab.study.follow import course_metrics, curve_of, follow
from acmoe.lab.study.outcome import News, Outcome, routing_metrics
from acmoe.lab.study.pairing import pair_with_plain
from acmoe.lab.study.scale_statistics import model_scale_statistics
from acmoe.runtime import pick_device, seeded
from acmoe.train.vision import ImageJournal
from acmoe.train.vision_step import VisionTrainer, check_images


def run_images(cell: Cell, folder: Path, news: News) -> Outcome:
    """Train in the folder, which is the caller's to throw away."""
    config, tests = cast(VisionRunConfig, cell.config), cast(ImageTests, cell.tests)
    device, images = pick_device(config.device), _images(config.data)
    check_images(config, images)
    with (
        seeded(config.seed, device),
        contextlib.closing(VisionTrainer(config, images, device)) as trainer,
    ):
        plain = vision_router("smoe", config.model)
        pair_with_plain(trainer.model, config.model, plain, config.seed)
        journal = ImageJournal(folder, "validation top-1 (%)")
        follow(
            trainer,
            journal,
            folder,
            steps=trainer.pace.steps,
            validate=trainer.validate,
            news=news,
        )
    curve = curve_of(folder, "valid", "top1")
    scales = model_scale_statistics(trainer.model)
    metrics = course_metrics(trainer, journal, folder, curve, scales, unit="images")
    asked = ImageEvaluateConfig(
        batch=tests.batch, limit=tests.images, precision=config.precision, routing=True
    )
    report = evaluate_images(trainer.model, images.test, config.data, asked, device=str(device))
    clean = report.figures[0]
    metrics |= {"test": clean.top1, "test_loss": clean.loss, **routing_metrics(clean.layers)}
    details: dict[str, Any] = {
        "layers": [asdict(layer) for layer in clean.layers],
        "scale": [scale._asdict() for scale in scales],
        "scored": {"statistics": clean.statistics, "batch": tests.batch, "images": report.images},
        "attacks": [],
    }
    for attack in tests.attacks:
        found = evaluate_attack(
            trainer.model,
            images.test,
            config.data,
            attack,
            device=str(device),
            progress=lambda stage, done, total: news(f"{stage}, batch {done} of {total}"),
        )
        for figure in found.figures:
            name = f"{attack_name(attack)} {eps_text(figure.eps)}"
            metrics[name] = figure.top1
            metrics[f"{name} moved"] = fmean(figure.moved)
        details["attacks"].append(found.to_json())
    return Outcome(
        metrics=metrics,
        curves={"valid": curve, "train_loss": curve_of(folder, "train", "loss")},
        details=details,
    )


@lru_cache(maxsize=1)
def _images(config: ImageDataConfig) -> ImageSplits:
    """Half a gigabyte for Imagenette; a worker's next cell reads the same."""
    return load_images(config)


def attack_name(config: AttackConfig) -> str:
    """`pgd`, or `pgd-paper` where the attack moves normalised images, as the paper's do."""
    return config.attack.name + ("-paper" if config.space == "normalized" else "")
