"""Tokens as a router reads them, x * scale[cluster], multiplied only when the result is needed.

T tokens, D features, C clusters. A shape (..., D) has T rows in all.
"""

import contextlib
from typing import NamedTuple

from torch import Tensor

from acmoe.ops.bounded import bounded, sums_are_bounded
from acmoe.ops.checks import check_clusters, host_may_read
from acmoe.ops.statistics.dispersion import accumulation_dtype


class ScaledTokens(NamedTuple):
    """The rescaled tokens x * scale[assignment], stored as the two factors.

    A router that needs the rescaled tokens calls `dense`; the fused kernel reads the factors. Where
    a token's scale is not that of one cluster, `product` holds the rescaled tokens instead.
    """

    x: Tensor  # (..., D)
    scale: Tensor | None = None  # (C, D) diagonals of M; None: M = I
    assignment: Tensor | None = None  # (T,) cluster of each token; -1: no cluster, M = I
    order: Tensor | None = None  # `RoutingState.order` of this assignment, or None
    product: Tensor | None = None  # (..., D) float32 rescaled tokens

    @property
    def is_cpu(self) -> bool:
        """Return True if the tokens are on a CPU; tensors have an attribute of this name."""
        return self.x.is_cpu

    def dense(self) -> Tensor:
        """Return rescaled tokens (..., D) in float32: bf16 would flip near-ties of the top-k.

        Tokens beyond 2^32 are shrunk (`bounded`), before and after they are rescaled.
        """
        if self.product is not None:
            return bounded(self.product)
        x = self.x.to(accumulation_dtype(self.x.dtype))
        if self.scale is None or self.assignment is None:
            return bounded(x)
        scale_TD = rows_of(self.scale, self.assignment)
        scale = scale_TD if x.dim() == 2 else scale_TD.view(x.shape)
        if host_may_read(x) and host_may_read(self.scale):
            few = scale_TD.shape[0] < self.scale.shape[0]  # fewer tokens than clusters
            if sums_are_bounded(x, scale_TD if few else self.scale):
                return x * scale
        return bounded(bounded(x) * scale)

    def rows(self) -> Tensor:
        """Return the (T, D) rows that a kernel reads: `product` if given, else x."""
        x = self.x if self.product is None else self.product
        return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def rows_of(scale_CD: Tensor, assignment_T: Tensor) -> Tensor:
    """Return (T, D): the scale of each token's cluster; ones for a token in no cluster, -1."""
    if host_may_read(assignment_T) and assignment_T.numpy()[0] >= 0:
        # torch checks all ids while it gathers, and raises for -1. In a first layer all ids are -1:
        # looking at the first id is faster than an error.
        with contextlib.suppress(IndexError):
            return scale_CD.index_select(0, assignment_T)
    check_clusters(assignment_T, scale_CD.shape[0])
    scale_TD = scale_CD[assignment_T.clamp(min=0)]
    return scale_TD.masked_fill((assignment_T < 0)[:, None], 1.0)
