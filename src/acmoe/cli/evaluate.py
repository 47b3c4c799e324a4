"""`acmoe evaluate RUN`: perplexity or bits per byte, clean and contaminated."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from acmoe.evaluate.language import LanguageReport


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a run over every token of a split, in each statistics mode asked for."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    split: Literal["valid", "test"] = "test"
    """Which text."""
    statistics: tuple[Literal["batch", "running", "prefix", "sequence"], ...] = ()
    """Statistics modes of the adaptive routers; none: the model's own."""
    contaminate: float | None = None
    """Also score a corrupted text: share of words (0.025 in the paper) or bytes replaced."""
    contaminate_seed: int = 0
    """One seed, one corrupted text, the same for every model."""
    which: Literal["best", "last"] = "best"
    """Checkpoint."""
    batch: int = 8
    """Rows the text is cut into: fewer rows, more context."""
    block: int | None = None
    """Tokens of a forward pass in each row; as in training if not given."""
    routing: bool = False
    """Also measure load balance and instability of every MoE layer."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        from acmoe.config.data import ContaminationConfig
        from acmoe.config.evaluate import EvaluateConfig
        from acmoe.evaluate.language import evaluate

        corrupt = None
        if self.contaminate is not None:
            corrupt = ContaminationConfig(rate=self.contaminate, seed=self.contaminate_seed)
        config = EvaluateConfig(
            split=self.split,
            which=self.which,
            statistics=self.statistics,
            contamination=corrupt,
            batch=self.batch,
            block=self.block,
            routing=self.routing,
        )
        report = evaluate(self.folder, config, device=self.device)
        if self.json:
            print(json_format.dumps(report.to_json(), indent=2))
        else:
            _show(report)
        return 0


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
    for figure in report.figures:
        if figure.layers and not figure.contaminated:
            layers = Table("MoE layer", "load balance (std, points)", "instability", "chance")
            for number, layer in enumerate(figure.layers):
                change = "" if layer.instability is None else f"{layer.instability:.3f}"
                chance = "" if layer.chance is None else f"{layer.chance:.3f}"
                layers.add_row(str(number), f"{layer.load_balance:.2f}", change, chance)
            console.print(layers)
