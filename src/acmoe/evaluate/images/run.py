"""Evaluate or attack a run of an image classifier on its own images."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from acmoe.config.images.attack import AttackConfig
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.data.progress import Progress, silent
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.evaluate.images.accuracy import ImageReport, evaluate_images
from acmoe.evaluate.images.attack import AttackReport, evaluate_attack
from acmoe.evaluate.run import ATTACKS, ImageRun, Which
from acmoe.routing.process_group import measuring_alone
from acmoe.storage.atomic import replace_text
from acmoe.storage.strict_json import json_text


class RunReport(NamedTuple):
    """The accuracy of a checkpoint, and the checkpoint's step."""

    step: int
    report: ImageReport
    ema: bool = False  # True: measured with the moving average of the weights

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, **_marked(self.ema), **self.report.to_json()}


class RunAttack(NamedTuple):
    """The report of an attack, the step of the attacked checkpoint, and the report's file."""

    step: int
    report: AttackReport
    path: Path
    ema: bool = False  # True: measured with the moving average of the weights

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, **_marked(self.ema), **self.report.to_json()}


def _marked(ema: bool) -> dict[str, bool]:
    """Return the JSON field of averaged weights, which reports of trained weights do not have."""
    return {"ema": True} if ema else {}


def evaluate_image_run(
    run: ImageRun,
    config: ImageEvaluateConfig,
    *,
    which: Which = "best",
    ema: bool = False,
    device: str = "auto",
    progress: Progress = silent,
    ranks: Ranks = ALONE,
) -> RunReport:
    """Score a checkpoint, or with `ema` its averaged weights, in the precision of its training.

    With several `ranks` each process scores its share of the batches.
    """
    images = run.images(warn=ranks.first)[config.split]
    config = replace(config, precision=run.config.precision)
    model = run.model(which, ema=ema)
    with measuring_alone(model):
        report = evaluate_images(
            *(model, images, run.config.data, config),
            device=device,
            progress=progress,
            ranks=ranks,
        )
    return RunReport(run.step(which), report, ema)


def attack_image_run(
    run: ImageRun,
    config: AttackConfig,
    *,
    which: Which = "best",
    ema: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> RunAttack:
    """Attack a checkpoint, or with `ema` its averaged weights, in float32.

    The results of each batch are saved in the run's folder, and the report at the end. After a
    crash, the same call runs only the batches that are left.
    """
    folder = run.folder / ATTACKS
    report = evaluate_attack(
        run.model(which, ema=ema),
        run.images()[config.split],
        run.config.data,
        config,
        folder=folder,
        device=device,
        progress=progress,
    )
    step = run.step(which)
    found = RunAttack(step, report, folder / _name(step, report, ema), ema)
    replace_text(found.path, json_text(found.to_json()) + "\n")
    return found


def _name(step: int, report: AttackReport, ema: bool) -> str:
    """Name the file of a report by its settings: a digest of everything but the results."""
    results = ("clean_top1", "clean_top5", "figures")
    settings = {key: value for key, value in report.to_json().items() if key not in results}
    radii = [figure.eps for figure in report.figures]
    text = json.dumps([step, settings, radii, *(["ema"] if ema else [])], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"report-{report.attack['name']}-{digest[:12]}.json"
