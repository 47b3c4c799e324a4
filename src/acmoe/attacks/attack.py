"""Run one attack on one batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.attacks.autoattack import autoattack
from acmoe.attacks.ball import Ball
from acmoe.attacks.gradient import fgsm, pgd
from acmoe.attacks.spsa import spsa
from acmoe.attacks.target import Target
from acmoe.config.images.attack import AnyAttack, FGSMConfig, PGDConfig, SPSAConfig


class Work(NamedTuple):
    """The work of an attack on one batch, for reports of progress."""

    amount: int
    unit: str  # the unit of `amount`, in the plural


def work_of(attack: AnyAttack) -> Work:
    """Return the work that `perturb` reports to `advance` in one call."""
    if isinstance(attack, PGDConfig):
        return Work(attack.steps, "steps")
    if isinstance(attack, SPSAConfig):
        return Work(attack.steps * attack.directions, "directions")
    return Work(1, "batches")


def perturb(
    target: Target,
    x: Tensor,
    labels: Tensor,
    eps: float,
    attack: AnyAttack,
    *,
    seed: int,
    advance: Callable[[int], None] = lambda amount: None,
) -> Tensor:
    """Return attacked images within eps of x and, if `target.clamp`, in the range of images.

    Call it inside `white_box(model)`. The attack moves each image away from its label. While it
    runs, `advance` is called with the amounts of work done, in the unit of `work_of(attack)`.
    """
    ball = Ball(x, eps, target.bounds(x))
    generator = torch.Generator(x.device).manual_seed(seed)
    if isinstance(attack, PGDConfig):
        return pgd(target, ball, labels, attack, generator, advance)
    if isinstance(attack, SPSAConfig):
        return spsa(target, ball, labels, attack, generator, advance)
    if isinstance(attack, FGSMConfig):
        found = fgsm(target, ball, labels)
    else:
        found = autoattack(target, ball, labels, attack, seed=seed)
    advance(1)
    return found
