"""Figures of a study: differences with intervals, and mean curves with standard deviations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from acmoe.analyze.figures.canvas import WIDTH, set_heading, write_axes, write_figure
from acmoe.analyze.figures.palette import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Curves differ in colour and in dashes; one of the two is enough to tell them apart.
_COLOURS = (BLUE, ORANGE, GREEN, RED, BLACK, SKY, PINK, YELLOW)
_DASHES = ("-", "--", "-.", ":")


class Bar(NamedTuple):
    """A mean difference and, if known, its interval; an open circle where it was not tested."""

    label: str
    group: str
    mean: float
    low: float | None
    high: float | None
    tested: bool = True


class Band(NamedTuple):
    """Mean and standard deviation of a curve over seeds, at each step."""

    label: str
    steps: Sequence[int]
    means: Sequence[float]
    spreads: Sequence[float]


def save_bars(bars: Sequence[Bar], folder: Path, *, name: str, label: str) -> tuple[Path, Path]:
    """Plot one row per comparison, in groups, with a line at zero, to `name`.png and .svg."""

    def draw(axes: Axes) -> None:
        rows, ticks, y = list(bars), [], 0.0
        for place, bar in enumerate(rows):
            first = place == 0 or rows[place - 1].group != bar.group
            if first:
                y += 1.0
                across = axes.get_yaxis_transform()  # x in fractions of the width, y in rows
                axes.text(
                    0.01, y - 0.6, bar.group, transform=across, fontsize=8, backgroundcolor="white"
                )
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [y, y], color=BLUE, linewidth=2)
            inner = BLUE if bar.tested else "white"
            axes.plot([bar.mean], [y], "o", color=BLUE, mfc=inner, markersize=6)
            ticks.append(y)
            y += 1.0
        axes.axvline(0, color=BLACK, linewidth=1)
        axes.set_yticks(ticks, [bar.label for bar in rows])
        axes.set_ylim(y, 0)
        axes.set(xlabel=label)

    groups = len({bar.group for bar in bars})
    height = 1.2 + 0.3 * (len(bars) + groups)
    return write_axes(draw, folder, name, size=(WIDTH, height))


def save_bands(
    bands: Sequence[Band], folder: Path, *, name: str, title: str, label: str, zero: bool = False
) -> tuple[Path, Path]:
    """Plot mean curves with their standard deviation to `name`.png and .svg.

    zero: draw a line at 0, for differences.
    """

    def draw(axes: Axes) -> None:
        for place, band in enumerate(bands):
            colour = _COLOURS[place % len(_COLOURS)]
            # When the colours repeat, the dashes change.
            dashes = _DASHES[(place + place // len(_COLOURS)) % len(_DASHES)]
            axes.plot(band.steps, band.means, dashes, color=colour, label=band.label)
            low = [mean - spread for mean, spread in zip(band.means, band.spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(band.means, band.spreads, strict=True)]
            axes.fill_between(band.steps, low, high, color=colour, alpha=0.15, linewidth=0)
        if zero:
            axes.axhline(0, color=BLACK, linewidth=1)
        axes.set(title=title, xlabel="optimizer step", ylabel=label)
        # The legend is outside the axes: inside it would hide curves.
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    height = max(4.4, 0.6 + 0.2 * len(bands))
    return write_axes(draw, folder, name, size=(9.0, height))


class Panel(NamedTuple):
    """The curves of one measure; a condition has one, or one without and one with M."""

    label: str  # label of the y axis
    rows: Sequence[Sequence[Band | None]]  # for each condition; None: not recorded
    runs: Sequence[int]  # number of runs of each condition that have the measure


def save_panels(
    panels: Sequence[Panel], conditions: Sequence[str], folder: Path, *, name: str, title: str
) -> tuple[Path, Path]:
    """Plot one pair of axes for each measure, a colour for each condition, to `name`.png and .svg.

    Curves with M are dashed. The title of a panel has the number of runs of each condition.
    """

    def draw(figure: Figure) -> None:
        set_heading(figure, title)
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_panel(axes, panel)
        handles = [
            all_axes[0].plot([], [], color=_COLOURS[place % len(_COLOURS)], label=condition)[0]
            for place, condition in enumerate(conditions)
        ]
        if any(len(row) > 1 and row[1] is not None for panel in panels for row in panel.rows):
            handles += [
                all_axes[0].plot([], [], dashes, color=BLACK, label=label)[0]
                for dashes, label in (("-", "without M"), ("--", "with M"))
            ]
        figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles))

    return write_figure(draw, folder, name, size=(3.6 * len(panels), 3.8))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for place, row in enumerate(panel.rows):
        for band, dashes in zip(row, ("-", "--"), strict=False):
            if band is None:
                continue
            colour = _COLOURS[place % len(_COLOURS)]
            axes.plot(band.steps, band.means, dashes, color=colour, marker=".")
            low = [mean - spread for mean, spread in zip(band.means, band.spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(band.means, band.spreads, strict=True)]
            axes.fill_between(band.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="optimizer step", ylabel=panel.label)
    if any(panel.runs):
        axes.set_title(f"n = {', '.join(map(str, panel.runs))}", fontsize=8)
    else:
        axes.set_title("not recorded", fontsize=8)
        axes.set(xticks=[], yticks=[])
