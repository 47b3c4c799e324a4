"""Patch embedding of images, and merging of patches into coarser maps.

Shapes: B batch, C channels, Y rows and X columns of the map, P numbers per patch, D features.
"""

from typing import cast

import torch
from torch import Tensor, nn

from acmoe.models.unmodified import modified
from acmoe.ops.dispatch import log_once


class PatchEmbedding(nn.Module):
    """(B, C, height, width) -> (B, Y, X, D): one token per square patch of pixels.

    Where `project` was wrapped or has hooks it is called; otherwise a GEMM reads its weight.
    """

    def __init__(self, *, channels: int, dim: int, patch: int, norm: bool) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        change = modified(self.project, nn.Conv2d)
        if change is None:
            return cast(Tensor, self.norm(self._by_gemm(images)))
        log_once(f"patches are embedded by a convolution: project {change}")
        return cast(Tensor, self.norm(self.project(images).permute(0, 2, 3, 1)))

    def _by_gemm(self, images: Tensor) -> Tensor:
        """Return (B, Y, X, D) what `project` computes, by a GEMM with its weight.

        The convolution of cuDNN may sum the weight gradient in a different order in every run.
        """
        B, C, height, width = images.shape
        side = self.project.kernel_size[0]
        squares = images.view(B, C, height // side, side, width // side, side)
        pixels_BYXP = squares.permute(0, 2, 4, 1, 3, 5).flatten(3)
        weight_DP = self.project.weight.flatten(1)
        return nn.functional.linear(pixels_BYXP, weight_DP, self.project.bias)


class PatchMerging(nn.Module):
    """(B, Y, X, D) -> (B, Y/2, X/2, 2D): each 2 x 2 square of tokens becomes one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x_BYXD: Tensor) -> Tensor:
        # Concatenate down each column of the square first, the order of published Swin weights.
        corners = [x_BYXD[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return cast(Tensor, self.reduction(self.norm(torch.cat(corners, dim=-1))))
