"""FGSM and PGD: attacks that follow the sign of the gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.attacks.target import FiniteGradients, Target, loss_gradient
from acmoe.config.images.attack import PGDConfig


def fgsm(target: Target, ball: Ball, labels: Tensor) -> Tensor:
    """Return x + eps * sign(gradient), projected to the ball."""
    finite = FiniteGradients()
    gradient = finite.record(loss_gradient(target, ball.x, labels))
    finite.check()
    return ball.project(ball.x + ball.eps * gradient.sign())


def pgd(
    target: Target,
    ball: Ball,
    labels: Tensor,
    config: PGDConfig,
    generator: torch.Generator,
    advance: Callable[[int], None],
) -> Tensor:
    """Take steps of `step_size` * eps along the sign of the gradient, projected to the ball.

    `advance(1)` is called after every step.
    """
    x, finite = ball.random(generator) if config.random_start else ball.x, FiniteGradients()
    for _ in range(config.steps):
        gradient = finite.record(loss_gradient(target, x, labels))
        x = ball.project(x + config.step_size * ball.eps * gradient.sign())
        advance(1)
    finite.check()
    return x
