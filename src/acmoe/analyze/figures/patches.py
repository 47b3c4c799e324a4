"""Draw each patch of an image in its expert's colour, as in the paper's figure.

N images, H x W pixels, Y x X patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import set_heading, write_figure
from acmoe.analyze.figures.inputs import Numbers, as_experts, check_captions, check_count
from acmoe.analyze.figures.key import key_height, swatch_key
from acmoe.analyze.figures.patch_grid import (
    as_pixels,
    draw_experts,
    draw_pixels,
    image_grid,
    panel_side,
)
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_patches(
    images: Numbers,
    experts: Mapping[str, Numbers],
    folder: Path,
    *,
    num_experts: int,
    title: str,
    captions: Sequence[str] | None = None,
    name: str = "patches",
) -> tuple[Path, Path]:
    """Draw one row per image: the image, then one panel per router with its experts' colours.

    `images` is (N, 1 or 3, H, W), bytes or numbers in [0, 1]. `experts` maps each router's name to
    its first choices (N, Y, X). `captions` has one line per image.

    >>> # save_patches(pixels, {"SMoE": first_NYX}, folder, num_experts=8, title="Layer 3")
    """
    pixels = as_pixels(images, "images")
    check_count(len(pixels), 8, "images")
    check_count(len(experts), 4, "routers")
    maps = _maps(experts, len(pixels), num_experts)
    check_captions(captions, len(pixels))

    def draw(figure: Figure) -> None:
        grid = image_grid(figure, len(pixels), ("image", *maps))
        for row, pixels_HW3 in enumerate(pixels):
            draw_pixels(grid[row, 0], pixels_HW3)
            if captions is not None:
                grid[row, 0].set_ylabel(captions[row], fontsize=9)
            for axes, map_NYX in zip(grid[row, 1:], maps.values(), strict=True):
                draw_experts(axes, pixels_HW3, map_NYX[row])
        swatch_key(figure, list(maps.values()), num_experts)
        set_heading(figure, title)

    side = panel_side(max(map_NYX.shape[2] for map_NYX in maps.values()))
    tall = pixels.shape[1] / pixels.shape[2]
    width = max(3.6, 0.4 + (side + 0.25) * (1 + len(maps)))
    height = 0.75 + key_height(list(maps.values())) + (side * tall + 0.2) * len(pixels)
    return write_figure(draw, folder, name, size=(width, height))


def _maps(
    experts: Mapping[str, Numbers], images: int, num_experts: int
) -> dict[str, NDArray[np.int64]]:
    maps = {
        router: as_experts(choices, f"experts of {router!r}", 3, num_experts)
        for router, choices in experts.items()
    }
    for router, map_NYX in maps.items():
        check(
            len(map_NYX) == images,
            f"{router!r} has {len(map_NYX)} maps for {images} images; give one for each",
        )
    return maps
