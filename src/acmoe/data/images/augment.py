"""Augmentation of whole batches: uint8 images and labels -> normalised images and soft targets.

B images of S pixels a side; K classes. Everything runs on the device of the images. All random
draws follow from the seed of the batch, and none makes the host wait for the device.

Where B images are a share of a batch of several processes, the draws are made for the whole batch,
and those of the share are used: an image is augmented in the same way on any number of processes.
Two things depend on that number: the noise of erased rectangles, and the partner that mixup and
cutmix take, which is an image of the same process.
"""

import numpy as np
import torch
from torch import Tensor

from acmoe.config.images.data import RGB, AugmentConfig
from acmoe.data.images import transforms as image_ops
from acmoe.data.images.mix import (
    cutmix,
    cutmix_box,
    erase,
    erase_boxes,
    mixup,
    shift,
    soft_targets,
)
from acmoe.data.images.order import Share
from acmoe.data.images.randaugment import randaugment
from acmoe.data.transfer import constant, to_device


def normalize(images: Tensor, mean: RGB, std: RGB) -> Tensor:
    """Normalise uint8 images, or float images in [0, 1], by the mean and std of each channel."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    return (x - color(mean, x)) / color(std, x)


def color(values: RGB, like: Tensor) -> Tensor:
    """Return channel values as (1, 3, 1, 1), with the device and dtype of `like`."""
    return constant(values, like.device).to(like.dtype).view(1, 3, 1, 1)


class Augment:
    """Applies the augmentations of a config, in the order of Swin's recipe.

    >>> augment = Augment(AugmentConfig(), num_classes=10, mean=(0.5,) * 3, std=(0.5,) * 3)
    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> x, targets = augment(images, torch.tensor([3, 7]), seed=0)
    >>> x.shape, targets.shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 10]))
    """

    def __init__(self, config: AugmentConfig, *, num_classes: int, mean: RGB, std: RGB) -> None:
        self.config, self.num_classes, self.mean, self.std = config, num_classes, mean, std

    @torch.no_grad()
    def __call__(
        self, images: Tensor, labels: Tensor, *, seed: int, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map uint8 images (B, 3, S, S) and labels (B,) to float32 images and targets (B, K).

        share: the images' rows in a batch of several processes; None: they are the whole batch.
        """
        rng, share = np.random.default_rng(seed), share or Share.whole(len(images))
        moved = self._move(images, rng, share)
        x = normalize(self._color(moved, rng, share), self.mean, self.std)
        x = self._erase(x, seed, rng, share)
        targets_BK = soft_targets(labels, self.num_classes, self.config.label_smoothing)
        return self._mix(x, targets_BK, rng)

    def _move(self, images: Tensor, rng: np.random.Generator, share: Share) -> Tensor:
        """Flip and translate."""
        config, device = self.config, images.device
        if config.flip > 0:
            flipped_B = to_device(rng.random(share.batch)[share.rows] < config.flip, device)
            images = torch.where(flipped_B.view(-1, 1, 1, 1), images.flip(-1), images)
        if config.shift > 0:
            offsets_2B = rng.integers(-config.shift, config.shift + 1, size=(2, share.batch))
            down_B, right_B = to_device(offsets_2B[:, share.rows], device)
            images = shift(images, down_B, right_B, config.shift)
        return images

    def _color(self, images: Tensor, rng: np.random.Generator, share: Share) -> Tensor:
        """Apply RandAugment and colour jitter."""
        config = self.config
        if config.randaugment is not None:
            images = randaugment(
                images,
                magnitude=config.randaugment,
                std=config.randaugment_std,
                ops=config.randaugment_ops,
                rng=rng,
                share=share,
            )
        if config.color_jitter > 0:
            operations = (image_ops.brightness, image_ops.contrast, image_ops.saturation)
            for number in rng.permutation(len(operations)):
                least = max(0.0, 1 - config.color_jitter)
                factor_B = rng.uniform(least, 1 + config.color_jitter, share.batch)[share.rows]
                images = operations[number](images, to_device(factor_B, images.device))
        return images

    def _erase(self, x: Tensor, seed: int, rng: np.random.Generator, share: Share) -> Tensor:
        if self.config.erase == 0:
            return x
        height, width = x.shape[-2:]
        boxes = erase_boxes(share.batch, height, width, self.config.erase, rng)
        boxes = [boxes[row] for row in share.rows.tolist()]
        # The first row tells the processes apart; it is 0 where there is one.
        generator = torch.Generator(x.device).manual_seed(seed + int(share.rows[0]))
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        return erase(x, boxes, noise)

    def _mix(
        self, x: Tensor, targets_BK: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Apply mixup or cutmix, with one mixing weight for the whole batch."""
        config = self.config
        cut = config.cutmix > 0 and (config.mixup == 0 or rng.random() < config.switch)
        if cut:
            share, (height, width) = rng.beta(config.cutmix, config.cutmix), x.shape[-2:]
            return cutmix(x, targets_BK, cutmix_box(height, width, share, rng))
        if config.mixup > 0:
            return mixup(x, targets_BK, float(rng.beta(config.mixup, config.mixup)))
        return x, targets_BK
