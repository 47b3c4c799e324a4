"""FGSM and PGD: attacks that follow the sign of the gradient."""

import torch
from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.attacks.target import Target, loss_gradient
from acmoe.config.attack import PGDConfig


def fgsm(target: Target, ball: Ball, labels: Tensor) -> Tensor:
    """x + eps * sign of the gradient."""
    return ball.project(ball.x + ball.eps * loss_gradient(target, ball.x, labels).sign())


def pgd(
    target: Target, ball: Ball, labels: Tensor, config: PGDConfig, generator: torch.Generator
) -> Tensor:
    """Steps of `step_size` * eps along the sign of the gradient, each projected to the ball."""
    x = ball.random(generator) if config.random_start else ball.x
    for _ in range(config.steps):
        step = config.step_size * ball.eps * loss_gradient(target, x, labels).sign()
        x = ball.project(x + step)
    return x
