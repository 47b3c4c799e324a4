"""The figure of the evidence page: our differences as shares of the paper's effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from acmoe.analyze.figures.canvas import write_axes
from acmoe.analyze.figures.palette import BLACK, BLUE, ORANGE
from acmoe.lab.study.evidence.rows import Row
from acmoe.lab.study.evidence.words import pairs_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FARTHEST = 6.0  # in effects of the paper; intervals are cut there


def save_effects(rows: Sequence[Row], folder: Path) -> tuple[Path, ...]:
    """Plot one interval per row, 0 for no effect and 1 for the paper's, to PNG and SVG.

    A row with fewer pairs than declared has an open circle.
    """
    shown = [
        row
        for row in rows
        if row.ours is not None and row.ours.low is not None and row.claim.effect is not None
    ]
    if not shown:
        return ()

    def draw(axes: Axes) -> None:
        for place, row in enumerate(shown):
            ours, effect = row.ours, row.claim.effect
            assert ours is not None and ours.low is not None and ours.high is not None
            assert effect is not None
            ends = sorted(cut(value / effect) for value in (ours.low, ours.high))
            axes.plot(ends, [place, place], color=BLUE, linewidth=2)
            inner = "white" if row.interim else BLUE
            if abs(ours.mean / effect) <= FARTHEST:  # a circle at the end would be a wrong mean
                axes.plot([ours.mean / effect], [place], "o", color=BLUE, mfc=inner, markersize=5)
        axes.axvline(0, color=BLACK, linewidth=1)
        axes.axvline(1, color=ORANGE, linewidth=1.5, linestyle="--")
        names = [f"{row.claim.title}; {row.setting} (n = {pairs_text(row)})" for row in shown]
        axes.set_yticks(range(len(shown)), names, fontsize=7)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(-FARTHEST, FARTHEST)
        axes.set(
            xlabel="our difference / the paper's: 0 no effect, 1 (dashed) the paper's\n"
            f"95 % intervals, cut at {FARTHEST:g}; no circle: beyond; open circle: pairs missing"
        )

    return tuple(write_axes(draw, folder, "evidence", size=(11.0, 1.2 + 0.3 * len(shown))))


def cut(value: float) -> float:
    """Return the value, or the end of the axis where it lies beyond."""
    return max(-FARTHEST, min(FARTHEST, value))
