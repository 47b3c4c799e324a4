"""Bar chart of router instability per layer, beside the level that chance would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acmoe.analyze.figures.canvas import WIDTH, wrapped, write_figure
from acmoe.analyze.figures.inputs import check_count
from acmoe.analyze.figures.palette import ROUTER_LOOKS
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Instability (the share of token pairs that are in one cluster at only one of the two layers), and
# its value for random clusters of the same sizes. None if no previous MoE layer routes the same
# tokens.
Bar = tuple[float, float] | None


def save_instability(
    layers: Mapping[str, Sequence[Bar]],
    folder: Path,
    *,
    title: str,
    name: str = "instability",
) -> tuple[Path, Path]:
    """Draw one group of bars per MoE layer and one bar per router, from the first MoE layer on.

    >>> # save_instability({"SMoE": [None, (0.18, 0.22)]}, folder, title="Switch-nano")
    """
    check_count(len(layers), len(ROUTER_LOOKS), "routers")
    depths = [
        depth
        for depth in range(max(len(bars) for bars in layers.values()))
        if any(depth < len(bars) and bars[depth] is not None for bars in layers.values())
    ]
    check(bool(depths), "no two MoE layers route the same tokens; instability needs two that do")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, bars in enumerate(layers.values()):
            _draw_bars(axes, place, len(layers), _bars_at(depths, bars))
        axes.set_xticks(range(len(depths)), [f"{depth} \u2192 {depth + 1}" for depth in depths])
        axes.set_xlim(-0.6, len(depths) - 0.4)
        axes.set(title=wrapped(title), xlabel="from one MoE layer to the next")
        axes.set_ylabel("instability (share of token pairs)")
        axes.grid(visible=False, axis="x")
        looks: list[Any] = [*axes.containers, axes.collections[0]]
        figure.legend(looks, [*layers, "chance"], loc="outside lower center", ncols=5)

    return write_figure(draw, folder, name, size=(max(WIDTH, 0.55 * len(depths)), 4.0))


def _bars_at(depths: list[int], bars: Sequence[Bar]) -> list[tuple[int, float, float]]:
    """Return (group, height, chance level) of each bar that this router has at `depths`."""
    found = [(x, bars[depth]) for x, depth in enumerate(depths) if depth < len(bars)]
    return [(x, *bar) for x, bar in found if bar is not None]


def _draw_bars(axes: Axes, place: int, routers: int, bars: list[tuple[int, float, float]]) -> None:
    look, width = ROUTER_LOOKS[place], min(0.4, 0.8 / routers)
    offset = (place - (routers - 1) / 2) * width
    x = [group + offset for group, _, _ in bars]
    axes.bar(
        x,
        [height for _, height, _ in bars],
        0.9 * width,
        color=look.colour,
        hatch=look.hatch,
        edgecolor="white",
        linewidth=0.6,
    )
    axes.hlines(
        [chance for _, _, chance in bars],
        [where - 0.42 * width for where in x],
        [where + 0.42 * width for where in x],
        color="black",
        linewidth=1.8,
    )
