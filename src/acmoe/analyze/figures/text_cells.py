"""Draw tokens in monospaced cells, wrapped like a page, on their experts' colours.

N tokens, E experts. Positions are columns and rows of characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import WIDTH
from acmoe.analyze.figures.key import shares, unused
from acmoe.analyze.figures.palette import expert_colour, faded, ink_on
from acmoe.analyze.figures.visible import ADVANCE, FONT, ends_line, visible
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Token = str | bytes

COLUMNS = 72
MARGIN = 0.15  # inches, left and right
# The font size at which a character is one column wide.
_POINTS = 72 * (WIDTH - 2 * MARGIN) / COLUMNS / ADVANCE
_ENTRY = 9  # columns of one entry of the key: a swatch and its share
_MOST_TOKENS = 5000


class Piece(NamedTuple):
    """The part of one token that is in one row."""

    token: int
    row: int
    column: int
    start: int  # range of the token's characters in this row
    stop: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """The position of every token. Texts drawn on the same page line up."""

    pieces: tuple[Piece, ...]
    rows: int


def check_tokens(tokens: Sequence[Token], name: str) -> None:
    check(
        0 < len(tokens) <= _MOST_TOKENS,
        f"{name} holds {len(tokens)} tokens; a page has room for 1 to {_MOST_TOKENS}",
    )


def lay_out(*texts: Sequence[Token], gap: int = 0) -> Page:
    """Find positions that serve several texts with the same number of tokens.

    A token is as wide as its widest version in any text. `gap` empty columns separate tokens.
    A newline in any text ends the row.
    """
    pieces, row, column = [], 0, 0
    for number, versions in enumerate(zip(*texts, strict=True)):
        width = max(len(visible(token)) for token in versions)
        if column and column + width > COLUMNS:
            row, column = row + 1, 0
        start = 0
        while start < width:  # a token longer than a row takes several
            stop = min(width, start + COLUMNS)
            pieces.append(Piece(number, row, column, start, stop))
            column += stop - start
            start = stop
            if start < width:
                row, column = row + 1, 0
        column += gap
        if any(map(ends_line, versions)):
            row, column = row + 1, 0
    return Page(pieces=tuple(pieces), rows=pieces[-1].row + 1)


def draw_tokens(
    axes: Axes,
    page: Page,
    tokens: Sequence[Token],
    experts_N: NDArray[np.int64],
    marked_N: NDArray[np.bool_] | None = None,
    underlined_N: NDArray[np.bool_] | None = None,
) -> None:
    """Draw every token as a tile with its text, in the colour of its expert.

    The expert's number is below the first of consecutive tokens with the same expert. With
    `marked_N`, the marked tokens are outlined and the others are faded.
    """
    from matplotlib.patches import Rectangle

    before: tuple[int, int] | None = None  # row and expert of the piece to the left
    for token, row, column, start, stop in page.pieces:
        expert, text = int(experts_N[token]), visible(tokens[token])[start:stop]
        marked = marked_N is not None and bool(marked_N[token])
        colour = expert_colour(expert)
        if marked_N is not None and not marked:
            colour = faded(colour, 0.35)
        tile = Rectangle((column + 0.04, row + 0.04), stop - start - 0.08, 0.92, color=colour)
        tile.set(linewidth=0)
        axes.add_patch(tile)
        ink = ink_on(colour)
        _write(axes, column, row + 0.36, text, ink, _POINTS)
        if marked or (row, expert) != before:
            _write(axes, column + 0.12, row + 0.81, str(expert), ink, 4.6)
        if marked:
            _outline(axes, column, row, stop - start)
        if underlined_N is not None and underlined_N[token]:
            axes.plot(
                (column + 0.1, column + stop - start - 0.1), (row + 0.64,) * 2, color=ink, lw=1.4
            )
        before = (row, expert)


def _write(axes: Axes, column: float, row: float, text: str, ink: str, points: float) -> None:
    if text.strip():
        axes.text(column, row, text, color=ink, fontsize=points, family=FONT, va="center_baseline")


def _outline(axes: Axes, column: int, row: int, width: int) -> None:
    from matplotlib.patches import Rectangle

    box = Rectangle((column, row), width, 1, fill=False, clip_on=False)
    box.set(edgecolor="black", linewidth=1.3, zorder=3)
    axes.add_patch(box)


def key_rows(experts_N: NDArray[np.int64], num_experts: int) -> int:
    """Return the number of rows that `draw_key` takes."""
    used = int((shares(experts_N, num_experts) > 0).sum())
    per_row = COLUMNS // _ENTRY
    return -(-used // per_row) + (1 if unused([experts_N], num_experts) else 0)


def draw_key(axes: Axes, experts_N: NDArray[np.int64], num_experts: int) -> None:
    """Draw a swatch with the number of each expert that has tokens, and its share of them."""
    from matplotlib.patches import Rectangle

    share_E, per_row = shares(experts_N, num_experts), COLUMNS // _ENTRY
    used = np.flatnonzero(share_E)
    for place, expert in enumerate(used.tolist()):
        row, column = place // per_row, place % per_row * _ENTRY
        colour, label = expert_colour(expert), str(expert)
        width = 0.6 + len(label)
        axes.add_patch(Rectangle((column, row + 0.1), width, 0.8, color=colour, linewidth=0))
        _write(axes, column + 0.3, row + 0.5, label, ink_on(colour), _POINTS * 0.9)
        share = f"{share_E[expert]:.1f}%"
        _write(axes, column + width + 0.3, row + 0.5, share, "black", _POINTS * 0.9)
    rest = unused([experts_N], num_experts)
    if rest:
        _write(axes, 0, -(-len(used) // per_row) + 0.5, rest, "black", _POINTS * 0.9)
