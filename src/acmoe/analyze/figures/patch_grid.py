"""Draw images under a grid of patches, each coloured and numbered by its expert.

H x W pixels, Y x X patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.inputs import Numbers, as_array
from acmoe.analyze.figures.palette import expert_colour, ink_on, rgb
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OPACITY = 0.7  # opacity of the experts' colours over the image
_CELL = 10.0  # side of a patch in points: the smallest in which two digits can be read


def as_pixels(images: Numbers, name: str) -> NDArray[np.float64]:
    """Convert (N, 1 or 3, H, W) bytes, or numbers in [0, 1], to (N, H, W, 3) in [0, 1]."""
    array = as_array(images, name, 4)
    check(
        array.shape[1] in (1, 3),
        f"{name} has shape {array.shape}; give (images, 1 or 3, rows, columns)",
    )
    pixels = array / 255 if array.dtype == np.uint8 else array.astype(np.float64)
    low, high = pixels.min(), pixels.max()
    check(
        low >= -1e-6 and high <= 1 + 1e-6,
        f"{name} reaches from {low:g} to {high:g}; undo the normalisation, pixels are in [0, 1]",
    )
    pixels = np.broadcast_to(pixels, (len(pixels), 3, *pixels.shape[2:]))
    return pixels.transpose(0, 2, 3, 1).clip(0, 1)


def panel_side(patches: int) -> float:
    """Return the side of a panel in inches at which every patch has room for its number."""
    return max(1.45, patches * _CELL / 72)


def image_grid(figure: Figure, rows: int, headings: Sequence[str]) -> NDArray[Any]:
    """Lay out square panels, one column per heading, and return their axes (rows, columns)."""
    figure.set_layout_engine("compressed")  # leaves no gaps between square panels
    grid: NDArray[Any] = figure.subplots(rows, len(headings), squeeze=False)
    for axes, heading in zip(grid[0], headings, strict=True):
        axes.set_title(heading, loc="center", fontsize=10)
    return grid


def draw_pixels(axes: Axes, pixels_HW3: NDArray[np.float64]) -> None:
    axes.imshow(pixels_HW3, interpolation="nearest")
    _bare(axes)


def draw_experts(
    axes: Axes,
    pixels_HW3: NDArray[np.float64],
    experts_YX: NDArray[np.int64],
    marked_YX: NDArray[np.bool_] | None = None,
) -> None:
    """Draw the image in grey under its experts' colours, and outline the `marked` patches."""
    height, width, _ = pixels_HW3.shape
    rows, columns = experts_YX.shape
    extent = (0, columns, rows, 0)  # a patch is one unit in both directions
    grey_HW = pixels_HW3 @ (0.2126, 0.7152, 0.0722)
    # The grey levels start at 0.45: over black, a colour would look like another colour.
    axes.imshow(0.45 + 0.55 * grey_HW, cmap="gray", vmin=0, vmax=1, extent=extent)
    colours_YX4 = np.array(
        [[(*rgb(expert_colour(expert)), _OPACITY) for expert in row] for row in experts_YX]
    )
    axes.imshow(colours_YX4, extent=extent, interpolation="nearest")
    _borders(axes, experts_YX)
    _numbers(axes, experts_YX)
    if marked_YX is not None:
        _outlines(axes, marked_YX)
    axes.set_aspect((height / rows) / (width / columns))
    _bare(axes)


def _borders(axes: Axes, experts_YX: NDArray[np.int64]) -> None:
    """Draw white lines between neighbouring patches that have different experts."""
    from matplotlib.collections import LineCollection

    across = np.argwhere(experts_YX[:, 1:] != experts_YX[:, :-1])
    down = np.argwhere(experts_YX[1:] != experts_YX[:-1])
    lines: list[Any] = [((x + 1, y), (x + 1, y + 1)) for y, x in across]
    lines += [((x, y + 1), (x + 1, y + 1)) for y, x in down]
    axes.add_collection(LineCollection(lines, colors="white", linewidths=0.8), autolim=False)


def _numbers(axes: Axes, experts_YX: NDArray[np.int64]) -> None:
    size = 5.5 if experts_YX.shape[1] > 7 else 8.0
    for (row, column), expert in np.ndenumerate(experts_YX):
        axes.text(
            column + 0.5,
            row + 0.54,
            str(expert),
            ha="center",
            va="center",
            fontsize=size,
            color=ink_on(expert_colour(int(expert))),
        )


def _outlines(axes: Axes, marked_YX: NDArray[np.bool_]) -> None:
    from matplotlib.patches import Rectangle

    for row, column in np.argwhere(marked_YX):
        # A white line on a wider black one is visible on every colour.
        for colour, line in (("black", 2.6), ("white", 1.0)):
            box = Rectangle((column + 0.07, row + 0.07), 0.86, 0.86, fill=False)
            box.set(edgecolor=colour, linewidth=line, clip_on=False)
            axes.add_patch(box)


def _bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
