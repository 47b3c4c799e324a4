"""`acmoe demo`: train a plain and an adaptive model side by side, on Python's standard library."""

import os
import shlex
import shutil
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from acmoe.cli.arguments.shared import Json
from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from acmoe.train.side_by_side.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small plain (SMoE) and adaptive (ACMoE) model on the same data, and compare them."""

    out: Path = Path("runs/demo")
    """Folder for both runs, the report, the figure and the table."""
    seed: int = 0
    """Seed of both runs."""
    steps: int = 200
    """Number of optimizer steps of each run, at least 20; 200 take about a minute on two idle
    cores."""
    threads: int | None = None
    """Number of CPU threads of each run; the runs train at the same time. If not given:
    OMP_NUM_THREADS, else the number that continued runs were saved with, else 1."""
    open: bool = True
    """Do not open the report in a browser. It is opened only from a terminal on a desktop."""
    json: Json = False

    def run(self) -> int:
        from acmoe.storage.atomic import replace_text
        from acmoe.storage.writable import check_can_fill

        check_can_fill(self.out)
        comparison = self._compare()
        text = json_text(comparison.to_json())
        replace_text(self.out / "comparison.json", text + "\n")
        report = _report(self.out)
        figures = _figure(comparison, self.out)
        if self.json:
            print(text)
            return 0
        _show(comparison)
        for path in figures:
            print(f"wrote {path}")
        print(f"everything is in {self.out}: runs smoe and acmoe, comparison.json, report.html")
        print(f"open {report} in a browser: curves, a routing explorer, what the figures can show")
        print("next:")
        for command, purpose in next_commands(self.out).items():
            print(f"  {command}  # {purpose}")
        if self.open and may_open_browser():
            webbrowser.open(report.resolve().as_uri())
        return 0

    def _compare(self) -> "Comparison":
        from acmoe.errors import check
        from acmoe.train.side_by_side.compare import base_run, compare
        from acmoe.train.threads import choose_threads, use_threads

        check(self.steps >= 20, f"--steps {self.steps}; fewer than 20 steps show no curve")
        model = base_run(self.out, self.seed, self.steps).model
        threads = choose_threads(self.threads, model, run=self.out / "smoe")
        use_threads(threads)  # the processes of the runs are told; this one draws the report
        return compare(
            self.out,
            seed=self.seed,
            steps=self.steps,
            console=Console(stderr=True),
            parallel=threads,
        )


def next_commands(folder: Path) -> dict[str, str]:
    """Return commands to try after the demo, padded to one width, and the purpose of each."""
    program, run = program_name(), shlex.quote(str(folder / "acmoe"))
    commands = {
        f'{program} generate {run} --prompt "def "': "let the model write Python",
        f"{program} analyze {run}": "see what its routers do, layer by layer",
        f"{program} train switch-nano-acmoe": "train that model for 2,000 steps",
    }
    width = max(map(len, commands))
    return {command.ljust(width): purpose for command, purpose in commands.items()}


def program_name() -> str:
    """Return the name by which a shell finds this program: `make demo` calls .venv/bin/acmoe."""
    called = Path(sys.argv[0])
    if called.stem != "acmoe" or shutil.which("acmoe"):
        return "acmoe"
    return min(str(called), os.path.relpath(called), key=len)


def may_open_browser() -> bool:
    """Return True on a terminal with a desktop, and not in CI.

    Without a display, webbrowser would start a text browser inside this terminal.
    """
    if not sys.stdout.isatty() or os.environ.get("CI"):
        return False
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _report(folder: Path) -> Path:
    from acmoe.data.progress import progress_bars
    from acmoe.report.page import write_report

    with progress_bars(Console(stderr=True)) as progress:
        runs = (folder / "smoe", folder / "acmoe")
        path, notes = write_report(runs, folder / "report.html", progress=progress)
    for note in notes:
        print(note, file=sys.stderr)
    return path


def _show(comparison: "Comparison") -> None:
    table = Table("", *(row.router for row in comparison.rows))
    figures = (
        ("bits per byte, clean", "bits_per_byte", ".4f"),
        (f"bits per byte, {comparison.replaced:.1%} of bytes replaced", "contaminated", ".4f"),
        ("load std over experts (points, 0 is even)", "load_balance", ".2f"),
        ("instability between layers (share of token pairs)", "instability", ".3f"),
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


def _figure(comparison: "Comparison", folder: Path) -> tuple[Path, ...]:
    """Draw the validation curves; without matplotlib say so on standard error."""
    from acmoe.analyze.figures.convergence import save_curves
    from acmoe.errors import UserError

    curves = {curve.router: (curve.steps, curve.values) for curve in comparison.curves}
    try:
        return save_curves(
            curves,
            folder,
            metric="validation bits per byte",
            title=f"{comparison.corpus}, seed {comparison.seed}",
        )
    except UserError as missing:
        print(f"no figure: {missing}", file=sys.stderr)
        return ()
