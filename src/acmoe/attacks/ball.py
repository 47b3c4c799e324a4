"""The eps-ball around a batch of images, restricted to valid images.

B images with C channels, H rows, W columns, float32.
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.precision import wide_dtype

Bounds = tuple[Tensor, Tensor]  # least and greatest values, broadcastable to the images


class Ball:
    """All x' with |x' - x| <= eps in every pixel and, where given, least <= x' <= greatest.

    The bounds x - eps and x + eps are rounded towards x. The results of `project` thus differ from
    x by at most eps in exact arithmetic, not only up to the rounding of a sum.
    """

    def __init__(self, x: Tensor, eps: float, bounds: Bounds | None = None) -> None:
        check(
            x.dtype == torch.float32, f"images of {x.dtype}; attacks work in float32, convert them"
        )
        self.x, self.eps = x, eps
        self.low, self.high = rounded_sum(x, -eps), rounded_sum(x, eps)
        if bounds is not None:
            least, greatest = bounds
            outside = int(((x < least) | (x > greatest)).sum())
            check(
                outside == 0,
                f"{outside} numbers of the images lie outside the bounds of attacked images; "
                "normalise the images as the bounds, or give no bounds",
            )
            self.low, self.high = self.low.maximum(least), self.high.minimum(greatest)

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the ball."""
        return x.maximum(self.low).minimum(self.high)

    def random(self, generator: torch.Generator) -> Tensor:
        """Return x plus uniform noise in [-eps, eps], projected to the ball."""
        noise = torch.rand(self.x.shape, generator=generator, device=self.x.device)
        return self.project(self.x + (2 * noise - 1) * self.eps)


def rounded_sum(x: Tensor, step: float) -> Tensor:
    """Return the float32 number nearest to x + step between x and x + step, both included."""
    if wide_dtype(x.device) == torch.float64:
        exact = x.double() + step
        found = exact.float()
        too_far = found > exact if step > 0 else found < exact
    else:
        found, rest = _float32_sum(x, step)
        too_far = rest < 0 if step > 0 else rest > 0
    return torch.where(too_far, found.nextafter(x), found)


def _float32_sum(x: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Return the nearest float32 to x + step, and the sign of the exact sum minus it."""
    # Three float32 numbers hold the 53 bits of the step.
    parts: list[float] = []
    for _ in range(3):
        parts.append(float(torch.tensor(step - sum(parts), dtype=torch.float32)))
    first, second, third = parts
    found, error = _two_sum(x, first)
    error, least = _two_sum(error, second)
    found, error = _two_sum(found, error)
    return found, error + (least + third)


def _two_sum(a: Tensor, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return a + b, rounded, and the error of the rounding, which float32 holds exactly (Knuth)."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)
