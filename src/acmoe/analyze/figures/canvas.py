"""One way to open, draw and write a figure: no global state, equal bytes for equal input."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acmoe.analyze.figures.visible import visible
from acmoe.analyze.theory_plots import STYLE
from acmoe.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: a page of print, and a column of the documentation
_DPI = 180
# Dates and versions would make equal figures unequal files.
_OPTIONS: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {"Software": None}},
    ".svg": {"metadata": {"Date": None, "Creator": None}},
}
# Labels and tokens are other people's text: a dollar sign in them is a dollar sign.
_RC: Any = {**STYLE, "text.parse_math": False}


def write_figure(
    draw: Callable[[Figure], None],
    folder: Path,
    name: str,
    *,
    size: tuple[float, float] = (WIDTH, 4.4),
) -> tuple[Path, Path]:
    """Let `draw` fill a figure of `size` inches, and write `name`.png and `name`.svg."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need the plots extra: pip install 'acmoe[plots]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own style file changes nothing
        matplotlib.rcParams.update(_RC)
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        draw(figure)
        for path in (png, svg):
            figure.savefig(path, **_OPTIONS[path.suffix])
    return png, svg


def wrapped(text: str, inches: float = WIDTH) -> str:
    """A heading, broken into lines that fit the width; folders may have any name."""
    return textwrap.fill(visible(" ".join(text.split())), int(12.5 * inches))


def set_heading(figure: Figure, title: str) -> None:
    """A title of the whole figure, flush left."""
    text = wrapped(title, figure.get_figwidth())
    figure.suptitle(text, x=0.02, ha="left", fontsize=11)
