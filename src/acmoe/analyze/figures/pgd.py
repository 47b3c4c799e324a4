"""Draw accuracy against the budget (radius eps) of an attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from acmoe.analyze.figures.canvas import WIDTH, set_heading, write_figure
from acmoe.analyze.figures.inputs import check_count
from acmoe.analyze.figures.lines import draw_lines
from acmoe.analyze.figures.palette import ROUTER_LOOKS
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Budgets, and the percentage of correct answers at each; budget 0 is the clean accuracy.
Sweep = tuple[Sequence[float], Sequence[float]]
# Input space of the attack -> unit of the x axis.
UNITS = {"pixel": "1/255 of the pixel range", "normalized": "1/255 in normalised pixels"}


def save_pgd(
    sweeps: Mapping[str, Mapping[str, Sweep]],
    folder: Path,
    *,
    title: str,
    space: str = "pixel",
    name: str = "pgd",
) -> tuple[Path, Path]:
    """Draw one panel per measure ("top-1", "top-5") and in it one line per router.

    The x axis shows 255 * eps; `space` is the attack's input space, in which eps is measured.

    >>> # save_pgd({"top-1": {"SMoE": ((0, 1/255), (94, 71))}}, folder, title="PGD, digits")
    """
    check_count(len(sweeps), 2, "measures")
    for measure, lines in sweeps.items():
        check_count(len(lines), len(ROUTER_LOOKS), f"routers of {measure}")
        for router, (_, percents) in lines.items():
            check(
                all(0 <= percent <= 100 for percent in percents),
                f"{measure} of {router!r} leaves 0 to 100; give accuracies in percent",
            )

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(sweeps), squeeze=False, sharey=True)[0]
        for axes, (measure, lines) in zip(panels, sweeps.items(), strict=True):
            _panel(axes, measure, lines)
        panels[0].set_ylabel("accuracy (% of images)")
        figure.supxlabel(f"budget of the attack ({UNITS[space]})", fontsize=10)
        set_heading(figure, title)
        panels[0].legend(loc="best")

    return write_figure(draw, folder, name, size=(WIDTH, 3.9))


def _panel(axes: Axes, measure: str, lines: Mapping[str, Sweep]) -> None:
    scaled = {
        router: ([255 * eps for eps in budgets], percents)
        for router, (budgets, percents) in lines.items()
    }
    draw_lines(axes, scaled)
    ticks = sorted({round(x, 6) for budgets, _ in scaled.values() for x in budgets})
    if len(ticks) <= 9:  # up to 9 budgets have room for a tick each
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(title=f"{measure} accuracy", ylim=(-3, 103))
