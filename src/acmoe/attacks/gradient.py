"""FGSM and PGD: attacks that follow the sign of the gradient."""

import torch
from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.attacks.target import Soundness, Target, loss_gradient
from acmoe.config.images.attack import PGDConfig


def fgsm(target: Target, ball: Ball, labels: Tensor) -> Tensor:
    """x + eps * sign of the gradient."""
    sound = Soundness()
    gradient = sound.note(loss_gradient(target, ball.x, labels))
    sound.check()
    return ball.project(ball.x + ball.eps * gradient.sign())


def pgd(
    target: Target, ball: Ball, labels: Tensor, config: PGDConfig, generator: torch.Generator
) -> Tensor:
    """Steps of `step_size` * eps along the sign of the gradient, each projected to the ball."""
    x, sound = ball.random(generator) if config.random_start else ball.x, Soundness()
    for _ in range(config.steps):
        gradient = sound.note(loss_gradient(target, x, labels))
        x = ball.project(x + config.step_size * ball.eps * gradient.sign())
    sound.check()
    return x
