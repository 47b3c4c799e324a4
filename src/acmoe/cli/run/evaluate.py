"""`acmoe evaluate RUN`: measure perplexity, bits per byte, or the accuracy on images."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.run.options import (
    ImageCapacity,
    Threads,
    Which,
    capacity_option,
    check_contaminate,
    run_threads,
)
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from acmoe.data.progress import Progress
    from acmoe.distributed.ranks import Ranks
    from acmoe.evaluate.images.run import RunReport
    from acmoe.evaluate.language_report import LanguageReport
    from acmoe.evaluate.routing import LayerReport


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a run over every token or image of a split, in each requested statistics mode.

    The scores are also written into the run's folder, where `acmoe report` finds them. With
    torchrun, each process scores a part of the rows of text or batches of images.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    split: Literal["valid", "test"] = "test"
    """The split to score."""
    statistics: tuple[Literal["batch", "running", "prefix", "sequence"], ...] = ()
    """Statistics modes of the adaptive routers, scored in turn; the model's own if not given."""
    contaminate: float | None = None
    """Text: also score a copy with this fraction of its words or bytes replaced (0.025 of the words
    in the paper)."""
    contaminate_seed: int = 0
    """Seed of the contamination. Equal seeds give every model the same corrupted text."""
    which: Which = "best"
    ema: bool = False
    """Images: use the moving average of the weights, which a run trained with ema=0.99996 keeps."""
    batch: int | None = None
    """Text: number of rows that the text is cut into, read side by side; 8 if not given. Fewer rows
    give tokens more context. Images: images per forward pass; 64 if not given."""
    capacity: ImageCapacity = None
    dropless: bool = False
    """Images: old spelling of --capacity none."""
    block: int | None = None
    """Text: tokens per row and forward pass; as in training if not given."""
    routing: bool = False
    """Also measure load balance and instability of every MoE layer."""
    device: Device = "auto"
    threads: Threads = None
    json: Json = False

    def run(self) -> int:
        from acmoe.config.images.train import VISION_RUNS
        from acmoe.config.parallel import ParallelConfig
        from acmoe.distributed.start import joined, launched_processes
        from acmoe.errors import check
        from acmoe.evaluate.run import run_kind

        check(
            self.contaminate is not None or self.contaminate_seed == 0,
            f"--contaminate-seed {self.contaminate_seed} without --contaminate; add the fraction "
            "of words or bytes to replace, such as --contaminate 0.025",
        )
        check_contaminate(self.contaminate)
        with joined(ParallelConfig(data=launched_processes()), self.device) as (ranks, device):
            run_threads(self.threads, self.folder, self.device)
            if run_kind(self.folder) in VISION_RUNS:
                found = self._images(ranks, str(device))
                self._print(found, lambda: _show_images(found), ranks)
            else:
                report = self._text(ranks, str(device))
                self._print(report, lambda: _show(report), ranks)
                self._say_lookahead(report, ranks)
        return 0

    def _save(self, document: dict[str, Any]) -> Path | None:
        """Leave the score in the run's folder; where that cannot be written, say so."""
        from acmoe.errors import UserError
        from acmoe.evaluate.saved import save_evaluation

        try:
            return save_evaluation(self.folder, document)
        except UserError as error:
            console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
            console.print(f"`acmoe report` will not show this score: {error}")
            return None

    def _print(
        self, report: "LanguageReport | RunReport", show: Callable[[], None], ranks: "Ranks"
    ) -> None:
        if not ranks.first:  # every process has the same report
            return
        document = report.to_json()
        path = self._save(document)  # before it is printed: a reader such as head may have left
        if self.json:
            print(json_text(document))
            return
        show()
        if path is not None:
            print(f"wrote {path}, which `acmoe report` shows")

    def _say_lookahead(self, report: "LanguageReport", ranks: "Ranks") -> None:
        """Say on standard error which of the printed scores depend on later tokens."""
        from acmoe.evaluate.lookahead import lookahead_in_scores
        from acmoe.evaluate.run import open_run

        if not ranks.first:
            return
        modes = dict.fromkeys(figure.statistics for figure in report.figures)
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        for line in lookahead_in_scores(open_run(self.folder).config.model.router, modes):
            console.print(line)

    def _images(self, ranks: "Ranks", device: str) -> "RunReport":
        from acmoe.config.images.data import ImageEvaluateConfig, parse_capacity
        from acmoe.errors import check
        from acmoe.evaluate.images.run import evaluate_image_run
        from acmoe.evaluate.run import open_image_run

        for name in ("contaminate", "block"):
            value = getattr(self, name)
            check(
                value is None,
                f"--{name} {value} is for text, and {self.folder} is a run of an image model; "
                "leave it out, or see `acmoe attack`",
            )
        config = ImageEvaluateConfig(
            split=self.split,
            statistics=self.statistics,
            capacity=parse_capacity(capacity_option(self.capacity, self.dropless) or "none"),
            batch=64 if self.batch is None else self.batch,
            routing=self.routing,
        )
        run = open_image_run(self.folder)
        with _progress(ranks) as progress:
            return evaluate_image_run(
                run,
                config,
                which=self.which,
                ema=self.ema,
                device=device,
                progress=progress,
                ranks=ranks,
            )

    def _text(self, ranks: "Ranks", device: str) -> "LanguageReport":
        from acmoe.config.text.data import ContaminationConfig
        from acmoe.config.text.evaluate import EvaluateConfig
        from acmoe.errors import check
        from acmoe.evaluate.language import evaluate

        capacity = capacity_option(self.capacity, self.dropless)
        check(
            capacity is None,
            f"--capacity {capacity} is for images, and {self.folder} is a run of a language model; "
            "leave it out",
        )
        check(
            not self.ema,
            f"--ema is for images, and {self.folder} is a run of a language model; leave it out",
        )
        corrupt = None
        if self.contaminate is not None:
            corrupt = ContaminationConfig(rate=self.contaminate, seed=self.contaminate_seed)
        config = EvaluateConfig(
            split=self.split,
            which=self.which,
            statistics=self.statistics,
            contamination=corrupt,
            batch=8 if self.batch is None else self.batch,
            block=self.block,
            routing=self.routing,
        )
        with _progress(ranks) as progress:
            return evaluate(self.folder, config, device=device, progress=progress, ranks=ranks)


def _progress(ranks: "Ranks") -> "AbstractContextManager[Progress]":
    """Return a context that gives the progress callback; only the first process shows anything."""
    from acmoe.data.progress import progress_bars, silent

    return progress_bars(Console(stderr=True)) if ranks.first else nullcontext(silent)


def _show(report: "LanguageReport") -> None:
    table = Table("statistics", "text", report.metric.replace("_", " "), "tokens")
    for figure in report.figures:
        text = "contaminated" if figure.contaminated else "clean"
        table.add_row(figure.statistics, text, f"{figure.value:.4f}", f"{figure.tokens:,}")
    console = Console()
    console.print(
        f"{report.corpus}, {report.split}; {report.batch} rows in blocks of {report.block}",
        highlight=False,
    )
    console.print(table)
    if report.contamination is not None and report.contamination_config is not None:
        unit = "bytes" if report.metric == "bits per byte" else "words"
        corrupt = report.contamination_config
        console.print(
            f"contaminated: {report.contamination.word_rate:.2%} of {unit} replaced (rate "
            f"{corrupt.rate:g}, seed {corrupt.seed}); {corrupt.targets} text is predicted",
            highlight=False,
        )
    for figure in report.figures:
        if figure.layers and not figure.contaminated:
            console.print(_layers(figure.layers, figure.statistics))


def _show_images(found: "RunReport") -> None:
    from acmoe.evaluate.images.capacity import capacity_text

    report = found.report
    table = Table("statistics", "top-1 (%)", "top-5 (%)", "loss (nats)")
    for figure in report.figures:
        top5 = "" if figure.top5 is None else f"{figure.top5:.2f}"
        table.add_row(figure.statistics, f"{figure.top1:.2f}", top5, f"{figure.loss:.4f}")
    console = Console()
    console.print(
        f"{report.data}, {report.split}: {report.images:,} images of {report.size} px in batches "
        f"of {report.batch}; capacity {capacity_text(report.capacity)}; step {found.step}"
        f"{', averaged weights' if found.ema else ''}",
        highlight=False,
    )
    console.print(table)
    for figure in report.figures:
        if figure.layers:
            console.print(_layers(figure.layers, figure.statistics))


def _layers(layers: "Sequence[LayerReport]", statistics: str) -> Table:
    columns = ("MoE layer", "load balance (std, points)", "instability", "chance")
    table = Table(*columns, title=f"statistics: {statistics}")
    for number, layer in enumerate(layers, start=1):  # as `acmoe analyze` and the report count
        change = "" if layer.instability is None else f"{layer.instability:.3f}"
        chance = "" if layer.chance is None else f"{layer.chance:.3f}"
        table.add_row(str(number), f"{layer.load_balance:.2f}", change, chance)
    return table
