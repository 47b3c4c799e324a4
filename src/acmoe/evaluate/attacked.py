"""Attacked images themselves, for those who look at what they do to a model.

B images, K classes.
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
from acmoe.data.seeding import derive_seed
from acmoe.errors import check
from acmoe.runtime import seeded


def attacked_images(
    model: nn.Module, data: ImageDataConfig, config: AttackConfig, device: torch.device
) -> Callable[[ImageBatch, int], Tensor]:
    """A batch and its number -> what the classifier reads after the attack, (B, 3, S, S) float32.

    The images are those of `evaluate_attack` with the same config: what is drawn follows from the
    seed, the radius and the batch's number.
    """
    check(
        len(config.eps) == 1, f"{len(config.eps)} radii; images are attacked within one: give one"
    )
    (eps,), (mean, std) = config.eps, data.normalization
    target = Target.of(model, data, config)

    def attacked(batch: ImageBatch, number: int) -> Tensor:
        seed = derive_seed(config.seed, config.attack.name, repr(eps), number)
        with seeded(seed, device), white_box(model):
            x = target.enter(batch.images.to(device))
            with torch.no_grad():
                predicted_B = target(x).argmax(-1)
            aim_B = batch.labels.to(device) if config.labels == "true" else predicted_B
            x = perturb(target, x, aim_B, eps, config.attack, seed=seed)
        return x if config.space == "normalized" else normalize(x, mean, std)

    return attacked
