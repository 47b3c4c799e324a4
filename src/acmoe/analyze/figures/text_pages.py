"""Put pages of tokens, with their headings and keys, one below the other.

N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import WIDTH, wrapped
from acmoe.analyze.figures.text_cells import (
    COLUMNS,
    MARGIN,
    Page,
    Token,
    draw_key,
    draw_tokens,
    key_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Heights in inches.
_ROW = 0.235  # a row of tokens
_LINE = 0.24  # a line of a heading
_GAP = 0.1


class TextPages:
    """Collect pages, then set the height of the figure to what they need and draw them."""

    def __init__(self, title: str) -> None:
        self._height = _GAP
        self._steps: list[Callable[[Figure], None]] = []
        self._add_heading(title, 11.0)

    def add_page(
        self,
        heading: str,
        page: Page,
        tokens: Sequence[Token],
        experts_N: NDArray[np.int64],
        num_experts: int,
        marked_N: NDArray[np.bool_] | None = None,
        underlined_N: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add a heading, a page as `draw_tokens` draws it, and its key."""
        self._add_heading(heading, 10.0)
        self._add_rows(
            page.rows,
            lambda axes: draw_tokens(axes, page, tokens, experts_N, marked_N, underlined_N),
        )
        rows = key_rows(experts_N, num_experts)
        self._add_rows(rows, lambda axes: draw_key(axes, experts_N, num_experts))

    def draw(self, figure: Figure) -> None:
        figure.set_layout_engine("none")
        figure.set_size_inches(WIDTH, self._height)
        for step in self._steps:
            step(figure)

    def _add_heading(self, text: str, points: float) -> None:
        for line in wrapped(text).splitlines():
            self._steps.append(partial(self._draw_line, line, points, self._height))
            self._height += _LINE

    def _draw_line(self, line: str, points: float, top: float, figure: Figure) -> None:
        low = 1 - (top + 0.7 * _LINE) / self._height
        figure.text(MARGIN / WIDTH, low, line, fontsize=points)

    def _add_rows(self, count: int, draw: Callable[[Axes], None]) -> None:
        self._steps.append(partial(self._draw_rows, count, draw, self._height))
        self._height += count * _ROW + _GAP

    def _draw_rows(
        self, count: int, draw: Callable[[Axes], None], top: float, figure: Figure
    ) -> None:
        height = count * _ROW / self._height
        low = 1 - top / self._height - height
        axes = figure.add_axes((MARGIN / WIDTH, low, 1 - 2 * MARGIN / WIDTH, height))
        axes.set(xlim=(0, COLUMNS), ylim=(count, 0))
        axes.set_axis_off()
        draw(axes)
