"""Show which patches or tokens go to another expert when the input is attacked.

N tokens or images, H x W pixels, Y x X patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import set_heading, write_figure
from acmoe.analyze.figures.inputs import (
    Numbers,
    as_array,
    as_experts,
    check_captions,
    check_count,
)
from acmoe.analyze.figures.key import key_height, swatch_key
from acmoe.analyze.figures.patch_grid import (
    as_pixels,
    draw_experts,
    draw_pixels,
    image_grid,
    panel_side,
)
from acmoe.analyze.figures.text_cells import Token, check_tokens, lay_out
from acmoe.analyze.figures.text_pages import TextPages
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_changed_patches(
    images: tuple[Numbers, Numbers],
    experts: tuple[Numbers, Numbers],
    folder: Path,
    *,
    num_experts: int,
    title: str,
    captions: Sequence[str] | None = None,
    name: str = "attack_changes",
) -> tuple[Path, Path]:
    """Draw one row per image: clean, attacked, and the experts of both, changed patches outlined.

    `images` is the pair (clean, attacked) of arrays (N, 1 or 3, H, W), and `experts` the same pair
    of first choices (N, Y, X). Attacked pixels outside [0, 1] are clamped for drawing.

    >>> # save_changed_patches((clean, attacked), (before, after), folder, num_experts=8, ...)
    """
    clean = as_pixels(images[0], "clean images")
    attacked = as_pixels(_clamped(images[1]), "attacked images")
    check_count(len(clean), 8, "images")
    check(
        clean.shape == attacked.shape,
        f"clean images are {clean.shape}, attacked ones {attacked.shape}; pair them",
    )
    before, after = _pair(experts, 3, len(clean), num_experts)
    check_captions(captions, len(clean))

    def draw(figure: Figure) -> None:
        headings = ("clean", "attacked", "experts, clean", "experts, attacked")
        grid = image_grid(figure, len(clean), headings)
        for row, one in enumerate(zip(clean, attacked, before, after, strict=True)):
            _draw_pair(grid[row], *one, caption="" if captions is None else captions[row])
        swatch_key(figure, [before, after], num_experts)
        set_heading(figure, f"{title}; moved patches outlined")

    side = panel_side(before.shape[2])
    tall = clean.shape[1] / clean.shape[2]
    height = 0.75 + key_height([before, after]) + (side * tall + 0.2) * len(clean)
    return write_figure(draw, folder, name, size=(0.6 + 4 * (side + 0.25), height))


def _draw_pair(
    row: Sequence[Axes],
    clean_HW3: NDArray[np.float64],
    attacked_HW3: NDArray[np.float64],
    before_YX: NDArray[np.int64],
    after_YX: NDArray[np.int64],
    *,
    caption: str,
) -> None:
    changed_YX = before_YX != after_YX
    draw_pixels(row[0], clean_HW3)
    draw_pixels(row[1], attacked_HW3)
    draw_experts(row[2], clean_HW3, before_YX, changed_YX)
    draw_experts(row[3], attacked_HW3, after_YX, changed_YX)
    count = f"{int(changed_YX.sum())} of {changed_YX.size} moved"
    row[0].set_ylabel(f"{caption}\n{count}".strip(), fontsize=9)


def save_changed_text(
    tokens: tuple[Sequence[Token], Sequence[Token]],
    experts: tuple[Numbers, Numbers],
    folder: Path,
    *,
    num_experts: int,
    title: str,
    gap: int = 0,
    name: str = "attack_changes",
) -> tuple[Path, Path]:
    """Draw the clean text above the attacked text, each token on the colour of its first expert.

    `tokens` is the pair (clean, attacked) of equally long token lists, and `experts` the same pair
    of first choices (N,). Tokens whose expert changed are outlined in both texts and the others are
    faded. Tokens that the attack replaced are underlined in the attacked text.

    >>> # save_changed_text((b"def", b"dxf"), ([0, 1, 2], [0, 3, 3]), folder, num_experts=8, ...)
    """
    clean, attacked = tokens
    check_tokens(clean, "clean text")
    check(
        len(clean) == len(attacked),
        f"{len(clean)} clean tokens and {len(attacked)} attacked ones; pair them place for place",
    )
    before_N, after_N = _pair(experts, 1, len(clean), num_experts)
    changed_N = before_N != after_N
    replaced_N = np.array([old != new for old, new in zip(clean, attacked, strict=True)])
    moved = f"{int(changed_N.sum())} of {len(clean)} tokens moved"
    swapped = f"{int(replaced_N.sum())} replaced (underlined)"

    def draw(figure: Figure) -> None:
        page, text = lay_out(clean, attacked, gap=gap), TextPages(title)
        old = f"clean: {moved} (outlined)"
        text.add_page(old, page, clean, before_N, num_experts, changed_N)
        new = f"attacked: {swapped}"
        text.add_page(new, page, attacked, after_N, num_experts, changed_N, replaced_N)
        text.draw(figure)

    return write_figure(draw, folder, name)


def _pair(
    experts: tuple[Numbers, Numbers], ndim: int, count: int, num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    before = as_experts(experts[0], "clean experts", ndim, num_experts)
    after = as_experts(experts[1], "attacked experts", ndim, num_experts)
    check(
        before.shape == after.shape and len(before) == count,
        f"experts are {before.shape} and {after.shape} for {count} inputs; pair them",
    )
    return before, after


def _clamped(images: Numbers) -> NDArray[Any]:
    array = as_array(images, "attacked images", 4)
    return array if array.dtype == np.uint8 else array.clip(0, 1)
