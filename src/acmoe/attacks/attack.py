"""Run one attack on one batch."""

import torch
from torch import Tensor

from acmoe.attacks.autoattack import autoattack
from acmoe.attacks.ball import Ball
from acmoe.attacks.gradient import fgsm, pgd
from acmoe.attacks.spsa import spsa
from acmoe.attacks.target import Target
from acmoe.config.images.attack import AnyAttack, FGSMConfig, PGDConfig, SPSAConfig


def perturb(
    target: Target, x: Tensor, labels: Tensor, eps: float, attack: AnyAttack, *, seed: int
) -> Tensor:
    """Return attacked images within eps of x and, if `target.clamp`, in the range of images.

    Call it inside `white_box(model)`. The attack moves each image away from its label.
    """
    ball = Ball(x, eps, target.bounds(x))
    generator = torch.Generator(x.device).manual_seed(seed)
    if isinstance(attack, FGSMConfig):
        return fgsm(target, ball, labels)
    if isinstance(attack, PGDConfig):
        return pgd(target, ball, labels, attack, generator)
    if isinstance(attack, SPSAConfig):
        return spsa(target, ball, labels, attack, generator)
    return autoattack(target, ball, labels, attack, seed=seed)
