"""SPSA: an attack that sees the classifier's answers and no gradient (Uesato et al. 2018).

B images, V directions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.attacks.target import Soundness, Target, margin
from acmoe.config.images.attack import SPSAConfig

Loss = Callable[[Tensor], Tensor]  # images -> one loss an image


def spsa_gradient(
    loss: Loss,
    x: Tensor,
    *,
    directions: int,
    delta: float,
    copies: int,
    generator: torch.Generator,
) -> Tensor:
    """mean over directions v of (loss(x + delta v) - loss(x - delta v)) v / (2 delta).

    The entries of v are +-1, so E[v v^T] = I, and for a loss linear around x the mean is its
    gradient. Directions are drawn one at a time: their values, and the memory needed beyond
    2 * `copies` batches, do not depend on how many there are.

    Args:
        loss: of copies of x one after the other, (copies * B, ...) -> (copies * B,).
        copies: how many go into one call.
    """
    total = torch.zeros_like(x)
    for first in range(0, directions, copies):
        drawn = min(copies, directions - first)
        v = torch.cat([_signs(x, generator) for _ in range(drawn)])  # (drawn * B, C, H, W)
        here = x.repeat(drawn, *[1] * (x.dim() - 1))
        slope = (loss(here + delta * v) - loss(here - delta * v)) / (2 * delta)
        weighted = slope.view(-1, *[1] * (x.dim() - 1)) * v
        total += weighted.view(drawn, *x.shape).sum(0)
    return total / directions


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, x.shape, generator=generator, device=x.device)
    return (2 * bits - 1).to(x.dtype)


@torch.no_grad()
def spsa(
    target: Target, ball: Ball, labels: Tensor, config: SPSAConfig, generator: torch.Generator
) -> Tensor:
    """Adam on the estimated gradient of the margin, from a random start, kept in the ball."""

    def loss(x: Tensor) -> Tensor:
        return margin(target.on_the_way(x), labels.repeat(len(x) // len(labels)))

    x, sound = ball.random(generator), Soundness()
    optimizer = torch.optim.Adam([x], lr=config.lr)
    for _ in range(config.steps):
        x.grad = sound.note(
            spsa_gradient(
                loss,
                x if config.estimate_at == "iterate" else 2 * ball.x,
                directions=config.directions,
                delta=config.delta,
                copies=config.copies,
                generator=generator,
            )
        )
        optimizer.step()
        x.copy_(ball.project(x))
    sound.check()
    x.grad = None
    return x
