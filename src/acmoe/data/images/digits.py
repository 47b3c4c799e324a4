"""The default image set: 1,797 scanned digits of 8 x 8 pixels that come with scikit-learn."""

import numpy as np

from acmoe.config.images.data import DIGITS_SIDE
from acmoe.data.images.pixels import Pixels, array_to_rgb
from acmoe.data.images.splits import ImageSet, ImageSplits, Indices, stratified
from acmoe.errors import UserError, check

SHARES = (0.15, 0.15)  # valid and test; the rest is for training


class DigitImages(ImageSet):
    """Grey scans, enlarged by repeating each pixel."""

    def __init__(self, grey: Pixels, labels: Indices) -> None:
        super().__init__(title="digits", classes=[str(d) for d in range(10)], labels=labels)
        self.grey = grey

    def pixels(self, index: int) -> Pixels:
        return array_to_rgb(self.grey[index], self.where(index))

    def where(self, index: int) -> str:
        return f"digits, image {index}"


def load_digit_splits(*, size: int, seed: int = 0) -> ImageSplits:
    """Load the digits at `size` pixels a side, split 70 : 15 : 15 within each class."""
    check(size % DIGITS_SIDE == 0, f"size={size} is no multiple of {DIGITS_SIDE}; digits need one")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("the digits come with scikit-learn: pip install 'acmoe[vision]'") from error
    scans, labels = load_digits(return_X_y=True)
    # Pixel values run from 0 to 16.
    grey = np.round(scans.reshape(-1, DIGITS_SIDE, DIGITS_SIDE) * (255 / 16)).astype(np.uint8)
    factor = size // DIGITS_SIDE
    grey = grey.repeat(factor, axis=1).repeat(factor, axis=2)
    whole = DigitImages(grey, labels.astype(np.int64))
    valid, test, train = stratified(whole.labels, SHARES, seed=seed)
    return ImageSplits(
        train=whole.subset(train), valid=whole.subset(valid), test=whole.subset(test)
    )
