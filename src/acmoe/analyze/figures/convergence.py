"""Convergence curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from acmoe.analyze.figures.canvas import wrapped, write_figure
from acmoe.analyze.figures.inputs import check_count
from acmoe.analyze.figures.lines import draw_lines
from acmoe.analyze.figures.palette import ROUTER_LOOKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    folder: Path,
    *,
    metric: str,
    title: str,
    name: str = "convergence",
) -> tuple[Path, Path]:
    """Draw one curve per router. A curve is its steps and values; `metric` labels the y axis.

    >>> # save_curves({c.router: (c.steps, c.values) for c in comparison.curves}, folder, ...)
    """
    check_count(len(curves), len(ROUTER_LOOKS), "curves")

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        draw_lines(axes, curves)
        axes.set(title=wrapped(title), xlabel="optimizer step", ylabel=metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()

    return write_figure(draw, folder, name)
