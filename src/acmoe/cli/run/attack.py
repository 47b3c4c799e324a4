"""`acmoe attack RUN --attack fgsm|pgd|spsa`: measure a classifier's accuracy under attack."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.run.options import (
    AttackDirections,
    AttackSteps,
    Dropless,
    Ema,
    ImageBatch,
    ImageStatistics,
    Threads,
    Which,
    capacity_option,
    run_threads,
    set_attack_options,
)
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.config.images.attack import AttackConfig
    from acmoe.evaluate.images.run import RunAttack


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Attack every image of a split within every radius. A repeated command continues the work."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run that trained an image classifier."""
    attack: Literal["fgsm", "pgd", "spsa", "autoattack"]
    """The attack. fgsm and pgd use gradients, spsa only the model's outputs; autoattack needs the
    package of that name."""
    preset: Literal["default", "paper"] = "default"
    """default: attack pixels within [0, 1] with the true labels. paper: attack normalised pixels
    without a bound, with the predicted labels."""
    eps: tuple[str, ...] = ()
    """Radii of the attack in the maximum norm, such as 1/255 2/255. They are fractions of the pixel
    range, and with --preset paper numbers of normalised pixels. The preset's own if not given."""
    steps: AttackSteps = None
    directions: AttackDirections = None
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the gradients for fgsm and pgd. The attacked images are scored in fp32."""
    split: Literal["valid", "test"] = "test"
    """The split to attack."""
    statistics: ImageStatistics = None
    capacity: str | None = None
    """Capacity factor of the experts. none drops no token, so the images of a batch do not compete
    for experts; a number such as the paper's 1.25 limits the tokens of each expert; model takes the
    factor of the training. If not given: none, or with --preset paper model."""
    dropless: Dropless = False
    allow_coupled: bool = False
    """Run autoattack although the images of a batch influence each other."""
    batch: ImageBatch = 64
    limit: int | None = None
    """Attack only this many images; all if not given."""
    seed: int = 0
    """Seed of the images' order, random starts and spsa's directions."""
    which: Which = "best"
    ema: Ema = False
    device: Device = "auto"
    threads: Threads = None
    json: Json = False

    def run(self) -> int:
        from acmoe.data.progress import progress_bars
        from acmoe.evaluate.images.run import attack_image_run
        from acmoe.evaluate.run import open_image_run

        config = self.config()
        run = open_image_run(self.folder)
        run_threads(self.threads, self.folder, self.device)
        with progress_bars(Console(stderr=True)) as progress:
            found = attack_image_run(
                run,
                config,
                which=self.which,
                ema=self.ema,
                device=self.device,
                progress=progress,
            )
        if self.json:
            print(json_text(found.to_json()))
        else:
            _show(found)
        return 0

    def config(self) -> "AttackConfig":
        from acmoe.config.images.attack import attack_config, parse_eps
        from acmoe.config.images.data import parse_capacity

        config = set_attack_options(
            attack_config(
                self.attack, preset=self.preset, eps=tuple(parse_eps(text) for text in self.eps)
            ),
            steps=self.steps,
            directions=self.directions,
            allow_coupled=self.allow_coupled or None,
        )
        capacity = capacity_option(self.capacity, self.dropless)
        return replace(
            config,
            precision=self.precision,
            split=self.split,
            statistics=self.statistics,
            capacity=config.capacity if capacity is None else parse_capacity(capacity),
            batch=self.batch,
            limit=self.limit,
            seed=self.seed,
        )


def _show(found: "RunAttack") -> None:
    from acmoe.config.images.attack import eps_text
    from acmoe.evaluate.images.capacity import capacity_text

    report = found.report
    table = Table("eps", "clean top-1", "attacked top-1", "attacked top-5", "tokens moved")
    for figure in report.figures:
        top5 = "" if figure.top5 is None else f"{figure.top5:.2f}"
        moved = f"{fmean(figure.moved):.2f}" if figure.moved else ""
        clean, attacked = f"{report.clean_top1:.2f}", f"{figure.top1:.2f}"
        table.add_row(eps_text(figure.eps), clean, attacked, top5, moved)
    console = Console()
    bound = "within the range of images" if report.clamp else "without a bound"
    console.print(
        f"{report.attack['name']} on {report.data}, {report.split}: {report.images:,} images in "
        f"batches of {report.batch}; {report.space} space, {bound}, {report.labels} labels; "
        f"statistics {report.statistics}; capacity {capacity_text(report.capacity)}; step "
        f"{found.step}{', averaged weights' if found.ema else ''}",
        highlight=False,
    )
    console.print(table)
    console.print(
        "percent; tokens moved: those whose first expert changed, mean over MoE layers",
        highlight=False,
    )
    console.print(f"wrote {found.path}", highlight=False, soft_wrap=True)
