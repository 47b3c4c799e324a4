"""SPSA: an attack that uses the logits of a classifier but no gradient (Uesato et al. 2018).

B images, V directions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.attacks.target import FiniteGradients, Target, margin
from acmoe.config.images.attack import SPSAConfig

Loss = Callable[[Tensor], Tensor]  # images -> one loss per image


def spsa_gradient(
    loss: Loss,
    x: Tensor,
    *,
    directions: int,
    delta: float,
    copies: int,
    generator: torch.Generator,
    advance: Callable[[int], None] = lambda amount: None,
) -> Tensor:
    """Estimate a gradient as mean over v of (loss(x + delta v) - loss(x - delta v)) v / (2 delta).

    The entries of v are +-1, so E[v v^T] = I, and for a loss that is linear around x the expected
    estimate is its gradient. Directions are drawn one at a time, so that their values do not depend
    on `copies`, and memory beyond 2 * `copies` batches does not grow with `directions`.

    Args:
        loss: maps concatenated copies of x, (copies * B, ...), to losses (copies * B,).
        copies: number of directions, and so copies of x, in one call of `loss`.
        advance: called with the number of directions of each pair of calls, after them.
    """
    total = torch.zeros_like(x)
    for first in range(0, directions, copies):
        drawn = min(copies, directions - first)
        v = torch.cat([_signs(x, generator) for _ in range(drawn)])  # (drawn * B, C, H, W)
        here = x.repeat(drawn, *[1] * (x.dim() - 1))
        slope = (loss(here + delta * v) - loss(here - delta * v)) / (2 * delta)
        weighted = slope.view(-1, *[1] * (x.dim() - 1)) * v
        total += weighted.view(drawn, *x.shape).sum(0)
        advance(drawn)
    return total / directions


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, x.shape, generator=generator, device=x.device)
    return (2 * bits - 1).to(x.dtype)


@torch.no_grad()
def spsa(
    target: Target,
    ball: Ball,
    labels: Tensor,
    config: SPSAConfig,
    generator: torch.Generator,
    advance: Callable[[int], None],
) -> Tensor:
    """Minimise the margin with Adam on estimated gradients, from a random start in the ball.

    `advance` is called with the number of directions tried, `steps` * `directions` in all.
    """

    def loss(x: Tensor) -> Tensor:
        return margin(target.unchecked_logits(x), labels.repeat(len(x) // len(labels)))

    x, finite = ball.random(generator), FiniteGradients()
    optimizer = torch.optim.Adam([x], lr=config.lr)
    for _ in range(config.steps):
        x.grad = finite.record(
            spsa_gradient(
                loss,
                x if config.estimate_at == "iterate" else 2 * ball.x,
                directions=config.directions,
                delta=config.delta,
                copies=config.copies,
                generator=generator,
                advance=advance,
            )
        )
        optimizer.step()
        x.copy_(ball.project(x))
    finite.check()
    x.grad = None
    return x
