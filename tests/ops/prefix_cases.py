"""Streams of tokens for the tests of causal dispersion.

B sequences, L tokens in each, D features, C clusters, J clusters read by each token.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from acmoe.ops.statistics.prefix import PREFIX_MEASURES, PrefixMoments, prefix_dispersion

measures = pytest.mark.parametrize("measure", PREFIX_MEASURES)


class Stream(NamedTuple):
    x: Tensor  # (B, L, D) float64
    assignment: Tensor  # (B, L)
    read: Tensor  # (B, L, J)
    token_mask: Tensor | None
    num_clusters: int

    def run(
        self, measure: str, before: PrefixMoments | None = None, places: slice = slice(None)
    ) -> tuple[Tensor, Tensor, PrefixMoments]:
        """The op on the tokens at `places`, from moments or from nothing."""
        B, _, D = self.x.shape
        if before is None:
            before = PrefixMoments.empty(B, self.num_clusters, D, dtype=self.x.dtype)
        mask = None if self.token_mask is None else self.token_mask[:, places]
        return prefix_dispersion(
            self.x[:, places],
            self.assignment[:, places],
            self.read[:, places],
            before,
            measure=measure,
            token_mask=mask,
        )


def some_stream(generator: torch.Generator, *, B: int = 2, L: int = 24, D: int = 3) -> Stream:
    read_BLJ = torch.randint(-1, 4, (B, L, 2), generator=generator)
    return Stream(
        torch.randn(B, L, D, generator=generator),
        read_BLJ[..., 0],
        read_BLJ,
        torch.rand(B, L, generator=generator) < 0.8,
        4,
    )
