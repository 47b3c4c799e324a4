"""Pages of tokens with their headings and keys, one below the other.

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

# Inches.
_ROW = 0.235
_LINE = 0.24  # of a heading
_GAP = 0.1


class TextPages:
    """Collects pages, then gives the figure the height that they need and draws them."""

    def __init__(self, title: str) -> None:
        self._height = _GAP
        self._steps: list[Callable[[Figure], None]] = []
        self._heading(title, 11.0)

    def add(
        self,
        heading: str,
        page: Page,
        tokens: Sequence[Token],
        experts_N: NDArray[np.int64],
        num_experts: int,
        marked_N: NDArray[np.bool_] | None = None,
        struck_N: NDArray[np.bool_] | None = None,
    ) -> None:
        """A page as `draw_tokens` draws it, and its key."""
        self._heading(heading, 10.0)
        self._rows(page.rows, lambda a: draw_tokens(a, page, tokens, experts_N, marked_N, struck_N))
        rows = key_rows(experts_N, num_experts)
        self._rows(rows, lambda axes: draw_key(axes, experts_N, num_experts))

    def draw(self, figure: Figure) -> None:
        figure.set_layout_engine("none")
        figure.set_size_inches(WIDTH, self._height)
        for step in self._steps:
            step(figure)

    def _heading(self, text: str, points: float) -> None:
        for line in wrapped(text).splitlines():
            self._steps.append(partial(self._write, line, points, self._height))
            self._height += _LINE

    def _write(self, line: str, points: float, top: float, figure: Figure) -> None:
        low = 1 - (top + 0.7 * _LINE) / self._height
        figure.text(MARGIN / WIDTH, low, line, fontsize=points)

    def _rows(self, count: int, draw: Callable[[Axes], None]) -> None:
        self._steps.append(partial(self._open, count, draw, self._height))
        self._height += count * _ROW + _GAP

    def _open(self, count: int, draw: Callable[[Axes], None], top: float, figure: Figure) -> None:
        height = count * _ROW / self._height
        low = 1 - top / self._height - height
        axes = figure.add_axes((MARGIN / WIDTH, low, 1 - 2 * MARGIN / WIDTH, height))
        axes.set(xlim=(0, COLUMNS), ylim=(count, 0))
        axes.set_axis_off()
        draw(axes)
