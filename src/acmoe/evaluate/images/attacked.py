"""Attacked images, to analyse what an attack changes inside a model.

B images of S pixels a side.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from acmoe.attacks.attack import perturb
from acmoe.attacks.target import Target, white_box
from acmoe.config.images.attack import AttackConfig
from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.augment import normalize
from acmoe.data.images.batches import ImageBatch
from acmoe.errors import check
from acmoe.evaluate.images.attack import batch_seed, labels_to_avoid
from acmoe.evaluate.images.capacity import using_capacity
from acmoe.runtime import seeded


def attacked_images(
    model: nn.Module,
    data: ImageDataConfig,
    config: AttackConfig,
    device: torch.device,
    advance: Callable[[int], None] = lambda amount: None,
) -> Callable[[ImageBatch, int], Tensor]:
    """Return a function of a batch and its number that gives the attacked model input.

    That input has shape (B, 3, S, S) and is float32. The images are those of `evaluate_attack` with
    the same config: random draws follow from the seed, the radius and the number of the batch.
    `advance` is called as by `perturb`.
    """
    check(
        len(config.eps) == 1, f"{len(config.eps)} radii; images are attacked within one: give one"
    )
    (eps,), (mean, std) = config.eps, data.normalization
    target = Target.of(model, data, config)

    def attacked(batch: ImageBatch, number: int) -> Tensor:
        seed = batch_seed(config, eps, number)
        with seeded(seed, device), using_capacity(model, config.capacity), white_box(model):
            x = target.enter(batch.images.to(device))
            with torch.no_grad():
                clean_BK = target(x)
            avoided_B = labels_to_avoid(config, batch.labels.to(device), clean_BK)
            x = perturb(target, x, avoided_B, eps, config.attack, seed=seed, advance=advance)
        return x if config.space == "normalized" else normalize(x, mean, std)

    return attacked
