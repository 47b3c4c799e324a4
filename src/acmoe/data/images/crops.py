"""Random crops of a whole batch at once, where the batch is.

B images of R pixels a side, crops of S pixels a side.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Boxes = NDArray[np.float32]  # (B, 4) left, top, width, height in pixels

TRIES = 10  # draws of a box that must fit, before the whole image is taken


def random_boxes(
    count: int,
    side: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Boxes:
    """Boxes of that share of the area and that ratio of width to height, in whole pixels.

    As `image_pixels.random_box` draws them one by one; a square of which no box fits is taken
    whole, or as much of it as the ratio allows.
    """
    share = rng.uniform(*area, size=(TRIES, count)) * side**2
    least, most = np.log(ratio)
    aspect = np.exp(rng.uniform(least, most, size=(TRIES, count)))
    wide, high = np.rint(np.sqrt(share * aspect)), np.rint(np.sqrt(share / aspect))
    fits = (wide >= 1) & (wide <= side) & (high >= 1) & (high <= side)
    own = fits.argmax(0), np.arange(count)  # the first that fits
    widest = min(max(1.0, ratio[0]), ratio[1])  # the ratio nearest to the square's own
    none = (np.rint(side * min(1.0, widest)), np.rint(side / max(1.0, widest)))
    wide, high = (
        np.where(fits[own], drawn[own], max(rest, 1))
        for drawn, rest in zip((wide, high), none, strict=True)
    )
    left, top = (
        np.where(fits[own], np.floor(rng.random(count) * (side - long + 1)), (side - long) // 2)
        for long in (wide, high)
    )
    return np.stack((left, top, wide, high), -1).astype(np.float32)


def cut_boxes(images: Tensor, boxes_B4: Tensor, size: int) -> Tensor:
    """(B, 3, S, S) uint8: the box of each image, bicubic.

    Made for boxes not much larger than the result: without antialiasing, a pixel reads the four
    nearest pixels along each side and no more.
    """
    side = images.shape[-1]
    centre_S = (torch.arange(size, device=images.device) + 0.5) / size
    left_B1, top_B1, wide_B1, high_B1 = boxes_B4[:, :, None].unbind(1)
    x_BS, y_BS = left_B1 + centre_S * wide_B1, top_B1 + centre_S * high_B1
    grid_BSS2 = torch.stack(
        (x_BS[:, None, :].expand(-1, size, -1), y_BS[:, :, None].expand(-1, -1, size)), -1
    )
    found = functional.grid_sample(
        images.float(),
        2 * grid_BSS2 / side - 1,
        mode="bicubic",
        padding_mode="border",
        align_corners=False,
    )
    return found.round_().clamp_(0, 255).to(torch.uint8)
