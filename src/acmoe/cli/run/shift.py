"""`acmoe shift RUN --set imagenet-a|imagenet-r|imagenet-o --from FOLDER`: score shifted images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.run.options import (
    Dropless,
    Ema,
    ImageBatch,
    ImageStatistics,
    Threads,
    Which,
    capacity_option,
    run_threads,
)
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.evaluate.images.shift import ShiftReport


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Score an image classifier on ImageNet-A or -R (accuracy), or on ImageNet-O (AUPR)."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run that trained an image classifier on class folders named by WordNet id."""
    shift: Annotated[Literal["imagenet-a", "imagenet-r", "imagenet-o"], tyro.conf.arg(name="set")]
    """The shifted set. imagenet-o is compared with the run's own test images of its classes."""
    source: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder of the shifted set, with one folder per class."""
    statistics: ImageStatistics = None
    capacity: str = "none"
    """Capacity factor of the experts. none drops no token, so the images of a batch do not compete
    for experts; a number such as the paper's 1.25 limits the tokens of each expert; model takes the
    factor of the training."""
    dropless: Dropless = False
    batch: ImageBatch = 64
    which: Which = "best"
    ema: Ema = False
    device: Device = "auto"
    threads: Threads = None
    json: Json = False

    def run(self) -> int:
        from acmoe.config.images.data import ImageEvaluateConfig, parse_capacity
        from acmoe.data.images.folder import open_folder
        from acmoe.data.progress import progress_bars
        from acmoe.errors import check
        from acmoe.evaluate.images.shift import evaluate_shift
        from acmoe.evaluate.run import open_image_run

        check(
            self.source.is_dir(),
            f"--from {self.source} is no folder; give that of {self.shift}, with one folder per "
            "class",
        )
        run = open_image_run(self.folder)
        run_threads(self.threads, self.folder, self.device)
        config = ImageEvaluateConfig(
            statistics=() if self.statistics is None else (self.statistics,),
            capacity=parse_capacity(capacity_option(self.capacity, self.dropless) or "none"),
            batch=self.batch,
            precision=run.config.precision,
        )
        images, step = run.images(), run.step(self.which)
        with progress_bars(Console(stderr=True)) as progress:
            report = evaluate_shift(
                run.model(self.which, ema=self.ema),
                self.shift,
                open_folder(self.source),
                run.config.data,
                config,
                classes=images.classes,
                clean=images.test if self.shift == "imagenet-o" else None,
                device=self.device,
                progress=progress,
            )
        if self.json:
            marked = {"ema": True} if self.ema else {}
            print(json_text({"step": step, **marked, **report.to_json()}))
        else:
            print(f"{_in_words(report)}; step {step}{', averaged weights' if self.ema else ''}")
        return 0


def _in_words(report: "ShiftReport") -> str:
    from acmoe.evaluate.images.capacity import capacity_text

    against = f" among {report.clean_images:,} clean ones" if report.clean_images else ""
    return (
        f"{report.shift}: {report.metric} {report.value:.2f} (chance {report.chance:.2f}) "
        f"on {report.images:,} images{against}, choosing among {report.classes} classes; "
        f"batches of {report.batch}, order {report.order}, statistics {report.statistics}, "
        f"capacity {capacity_text(report.capacity)}"
    )
