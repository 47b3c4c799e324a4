"""Images to maps of tokens, and maps to coarser ones.

Shapes: B batch, C channels, Y rows and X columns of the map, P numbers of a patch, D features.
"""

from typing import cast

import torch
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """(B, C, pixels, pixels) -> (B, Y, X, D): one token for each square of pixels."""

    def __init__(self, *, channels: int, dim: int, patch: int, norm: bool) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        # A matrix product: that of the convolution's library, on a GPU, may add a weight's gradient
        # in another order in every run.
        B, C, height, width = images.shape
        side = self.project.kernel_size[0]
        squares = images.view(B, C, height // side, side, width // side, side)
        pixels_BYXP = squares.permute(0, 2, 4, 1, 3, 5).flatten(3)
        weight_DP = self.project.weight.flatten(1)
        tokens_BYXD = nn.functional.linear(pixels_BYXP, weight_DP, self.project.bias)
        return cast(Tensor, self.norm(tokens_BYXD))


class PatchMerging(nn.Module):
    """(B, Y, X, D) -> (B, Y/2, X/2, 2D): the four tokens of a square become one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x_BYXD: Tensor) -> Tensor:
        # Down each column of the square first: the order published Swin weights expect.
        corners = [x_BYXD[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return cast(Tensor, self.reduction(self.norm(torch.cat(corners, dim=-1))))
