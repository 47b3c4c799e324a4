"""Open, draw and write figures without global state. Equal input gives byte-identical files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acmoe.analyze.figures.visible import visible
from acmoe.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: fits a printed page and a column of the documentation
_DPI = 180
# Without the dates and versions that matplotlib writes, equal figures are equal files.
_OPTIONS: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {"Software": None}},
    ".svg": {"metadata": {"Date": None, "Creator": None}},
}
_STYLE: Any = {  # Any: matplotlib's stubs list the keys of one version as literals
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.08,
    "svg.hashsalt": "acmoe",  # without a salt, element ids differ between two runs
}


def write_figure(
    draw: Callable[[Figure], None],
    folder: Path,
    name: str,
    *,
    size: tuple[float, float] = (WIDTH, 4.4),
    formulas: bool = False,
) -> tuple[Path, Path]:
    """Call `draw` on a figure of `size` inches, and write it as `name`.png and `name`.svg.

    Labels and tokens may hold any text, so a dollar sign is printed as it is. With `formulas`,
    matplotlib reads text between dollar signs as TeX.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need the plots extra: pip install 'acmoe[plots]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own style file
        matplotlib.rcParams.update({**_STYLE, "text.parse_math": formulas})
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        draw(figure)
        for path in (png, svg):
            figure.savefig(path, **_OPTIONS[path.suffix])
    return png, svg


def write_axes(
    draw: Callable[[Axes], None],
    folder: Path,
    name: str,
    *,
    size: tuple[float, float] = (WIDTH, 4.4),
    formulas: bool = False,
) -> tuple[Path, Path]:
    """Write a figure that has a single pair of axes, as `write_figure` does."""
    return write_figure(
        lambda figure: draw(figure.subplots()), folder, name, size=size, formulas=formulas
    )


def wrapped(text: str, inches: float = WIDTH) -> str:
    """Break a heading into lines that fit the width. Folder names in it may be of any length."""
    return textwrap.fill(visible(" ".join(text.split())), int(12.5 * inches))


def set_heading(figure: Figure, title: str) -> None:
    """Set the title of the whole figure, flush left."""
    text = wrapped(title, figure.get_figwidth())
    figure.suptitle(text, x=0.02, ha="left", fontsize=11)
