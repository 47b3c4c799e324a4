"""Tokens as a router reads them, x * scale[cluster], multiplied only when the result is needed.

T tokens, D features, C clusters. A shape (..., D) has T rows in all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.bounded import bounded
from acmoe.ops.route.rescaled import rescaled_tokens


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

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return rescaled tokens (..., D) in float32: bf16 would flip near-ties of the top-k.

        Tokens beyond 2^32 are shrunk (`bounded`), before and after they are rescaled. dtype: what
        the result is rounded to, for readers that compare nothing.
        """
        if self.product is not None:
            found = bounded(self.product)
            return found if dtype is None else found.to(dtype)
        return rescaled_tokens(self.x, self.scale, self.assignment, dtype)

    def rows(self) -> Tensor:
        """Return the (T, D) rows that a kernel reads: `product` if given, else x."""
        x = self.x if self.product is None else self.product
        return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
