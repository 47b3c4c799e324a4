"""`acmoe demo`: train SMoE and ACMoE side by side in minutes, on Python's standard library."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.train.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train SMoE and ACMoE nano models on the same data and seed, and compare them."""

    out: Path = Path("runs/demo")
    """Folder for both runs, the report, the figure and the table."""
    seed: int = 0
    """Seed of both runs."""
    steps: int = 300
    """Number of optimizer steps of each run; 300 take about two minutes on two cores."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        from acmoe.storage.atomic import replace_text
        from acmoe.train.compare import compare

        comparison = compare(
            self.out, seed=self.seed, steps=self.steps, console=Console(stderr=True)
        )
        text = json_text(comparison.to_json())
        replace_text(self.out / "comparison.json", text + "\n")
        report = _report(self.out)
        if self.json:
            print(text)
            return 0
        _show(comparison)
        for line in _figure(comparison, self.out):
            print(line)
        print(f"everything is in {self.out}: runs smoe and acmoe, comparison.json, report.html")
        print(f"open {report} in a browser: curves, a routing explorer, what the figures can show")
        print(f'next: acmoe generate {self.out}/acmoe --prompt "def "')
        return 0


def _report(folder: Path) -> Path:
    from acmoe.report.page import write_report

    path, _ = write_report((folder / "smoe", folder / "acmoe"), folder / "report.html")
    return path


def _show(comparison: "Comparison") -> None:
    table = Table("", *(row.router for row in comparison.rows))
    figures = (
        ("bits per byte, clean", "bits_per_byte", ".4f"),
        (f"bits per byte, {comparison.replaced:.1%} of bytes replaced", "contaminated", ".4f"),
        ("load balance (std over experts, points)", "load_balance", ".2f"),
        ("instability between layers", "instability", ".3f"),
        ("  what random clusters would have", "chance", ".3f"),
        ("seconds per step", "seconds_per_step", ".3f"),
    )
    for label, field, style in figures:
        table.add_row(label, *(format(getattr(row, field), style) for row in comparison.rows))
    console = Console()
    console.print(
        f"{comparison.corpus}: {comparison.steps} steps, {comparison.tokens:,} bytes read, "
        f"tested on {comparison.test_tokens:,}",
        highlight=False,
    )
    console.print(table)
    console.print(comparison.verdict, highlight=False)


def _figure(comparison: "Comparison", folder: Path) -> list[str]:
    from acmoe.analyze.figures.convergence import save_curves
    from acmoe.errors import UserError

    curves = {curve.router: (curve.steps, curve.values) for curve in comparison.curves}
    try:
        paths = save_curves(
            curves,
            folder,
            metric="validation bits per byte",
            title=f"{comparison.corpus}, seed {comparison.seed}",
        )
    except UserError as missing:
        return [f"no figure: {missing}"]
    return [f"wrote {path}" for path in paths]
