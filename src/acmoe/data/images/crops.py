"""Random crops of a whole batch at once, on the device of the batch.

B images of R pixels a side, crops of S pixels a side.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from acmoe.data.images.pixels import TRIES

Boxes = NDArray[np.float32]  # (B, 4) left, top, width, height in pixels


def random_boxes(
    count: int,
    side: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Boxes:
    """Draw one box per image, with a random area and aspect ratio, in whole pixels.

    `area` is a range of fractions of the image, `ratio` a range of width / height. The distribution
    is that of `pixels.random_box`. Where no draw fits, the box is the largest central one that the
    ratio allows.
    """
    share = rng.uniform(*area, size=(TRIES, count)) * side**2
    least, most = np.log(ratio)
    aspect = np.exp(rng.uniform(least, most, size=(TRIES, count)))
    wide, high = np.rint(np.sqrt(share * aspect)), np.rint(np.sqrt(share / aspect))
    fits = (wide >= 1) & (wide <= side) & (high >= 1) & (high <= side)
    first = fits.argmax(0), np.arange(count)  # the first draw that fits, for each image
    nearest = min(max(1.0, ratio[0]), ratio[1])  # the allowed ratio nearest to a square
    fallback = (np.rint(side * min(1.0, nearest)), np.rint(side / max(1.0, nearest)))
    wide, high = (
        np.where(fits[first], drawn[first], max(rest, 1))
        for drawn, rest in zip((wide, high), fallback, strict=True)
    )
    left, top = (
        np.where(fits[first], np.floor(rng.random(count) * (side - long + 1)), (side - long) // 2)
        for long in (wide, high)
    )
    return np.stack((left, top, wide, high), -1).astype(np.float32)


def cut_boxes(images: Tensor, boxes_B4: Tensor, size: int) -> Tensor:
    """Resize the box of each image to (B, 3, S, S) uint8, with bicubic interpolation.

    There is no antialiasing: an output pixel reads the four nearest pixels along each axis. Boxes
    should therefore not be much larger than the output.
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
