"""Draw lines of several routers that differ in colour, dashes and markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from acmoe.analyze.figures.palette import ROUTER_LOOKS
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_lines(axes: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    for look, (label, (x, y)) in zip(ROUTER_LOOKS, lines.items(), strict=False):
        check(len(x) == len(y), f"{label!r} has {len(x)} places and {len(y)} values; pair them")
        # About a dozen markers per line: more would hide its dashes.
        every = max(1, len(x) // 12)
        axes.plot(
            x,
            y,
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker,
            markevery=every,
            markersize=5,
            linewidth=1.8,
            label=label,
        )
