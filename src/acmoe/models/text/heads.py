"""Linear maps to the heads of attention, and from them.

Shapes: B batch, L length of the segment, N positions in view: before it and in it, D features,
H heads, P features of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.projection.op import project, project_both


class Projection(nn.Linear):
    """Queries, keys or values of positions in view, for each head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, dim, bias=False)
        self.heads = heads

    def forward(
        self,
        source: Tensor,
        *,
        segment: Tensor | None = None,
        beside: "Projection | None" = None,
        width: int = 0,
        queries: "Projection | None" = None,
    ) -> Any:
        """(B, N, D) -> (B, N, H * P); with another projection `beside` it (B, N, 2 * H * width),
        the maps of both, each head filled up with zeros to `width` features; with that of `queries`
        as well a pair, of it and of (B, L, H * P), theirs of the segment.

        One product reads the source once, and one gradient goes to the segment; a hook on this
        module sees all maps, and one on the others none. Zero rows of the weight give the zeros for
        little: copying every key and value into wider rows took a tenth of a training step (H200,
        switch-enwik8).
        """
        weight = self.weight
        if beside is not None:
            both = torch.stack([weight, beside.weight])
            both_2HPD = both.view(2, self.heads, -1, self.in_features)
            weight = F.pad(both_2HPD, (0, 0, 0, width - both_2HPD.shape[2])).flatten(0, 2)
        if segment is None:
            assert queries is None, "queries of no segment"
            return F.linear(source, weight)
        if queries is None:
            return project(source, segment, weight)
        return project_both(source, segment, weight, queries.weight)


class Output(nn.Linear):
    """What all heads found, joined."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, dim, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(..., H * P or more) -> (..., D). What each head has beyond its features is multiplied
        with zeros, and its gradient comes back as wide."""
        weight, width = self.weight, x.shape[-1] // self.heads
        if x.shape[-1] > self.in_features:
            weight_DHP = weight.view(self.out_features, self.heads, -1)
            weight = F.pad(weight_DHP, (0, width - weight_DHP.shape[2])).flatten(1)
        return F.linear(x, weight)
