"""The eps-ball around a batch of images, restricted to valid images.

B images with C channels, H rows, W columns, float32.
"""

import torch
from torch import Tensor

from acmoe.errors import check

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
        exact = x.double()
        low, high = exact - eps, exact + eps
        self.x, self.eps = x, eps
        self.low, self.high = low.float(), high.float()
        self.low = torch.where(self.low < low, self.low.nextafter(x), self.low)
        self.high = torch.where(self.high > high, self.high.nextafter(x), self.high)
        if bounds is not None:
            least, greatest = bounds
            outside = (x < least) | (x > greatest)
            check(not bool(outside.any()), "an image lies outside the range it is to be kept in")
            self.low, self.high = self.low.maximum(least), self.high.minimum(greatest)

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the ball."""
        return x.maximum(self.low).minimum(self.high)

    def random(self, generator: torch.Generator) -> Tensor:
        """Return x plus uniform noise in [-eps, eps], projected to the ball."""
        noise = torch.rand(self.x.shape, generator=generator, device=self.x.device)
        return self.project(self.x + (2 * noise - 1) * self.eps)
