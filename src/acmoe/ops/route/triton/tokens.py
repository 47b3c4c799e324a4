"""The tokens of a router as its kernels read them: in their own order, or sorted by cluster.

T tokens, D features, C clusters, X sorted places (ops/sort/triton/sort.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.sort.triton import sort as order

STRETCH = tl.constexpr(order.STRETCH)
# A table of so many numbers lies whole in every warp: looking a cluster up there takes no barrier.
# (Over 64 clusters a warp waits for others; the embedding's gradient 63 -> 90 us at olmoe, H200.)
MOST_LISTED = 32


class Tokens(NamedTuple):
    """What the kernels of a router read of its tokens, each optional part with a stand-in."""

    x: Tensor  # (T, D)
    scale: Tensor  # (C, D) float32
    # (T,) cluster of each token, what is not one of the C is none; (C + 1,) where each cluster of
    # sorted tokens ends if these are few
    cluster: Tensor
    mask: Tensor  # (T,) uint8
    place: Tensor  # (X,) int32 token at each sorted place, -1 for none
    has_scale: bool
    has_mask: bool
    has_order: bool
    listed: bool  # `cluster` is the second

    @classmethod
    def of(
        cls,
        x: Tensor,
        scale: Tensor | None,
        assignment: Tensor | None,
        mask: Tensor | None,
        place: Tensor | None,
        end: Tensor | None,
    ) -> "Tokens":
        x = x.contiguous()
        listed = scale is not None and end is not None and end.numel() - 1 <= MOST_LISTED
        cluster = end if listed else assignment
        return cls(
            x,
            x if scale is None else scale.contiguous(),
            x if cluster is None else cluster.contiguous(),
            x if mask is None else mask.contiguous().view(torch.uint8),
            x if place is None else place,
            scale is not None,
            mask is not None,
            scale is not None and place is not None,
            listed,
        )

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        return self[:5]

    @property
    def flags(self) -> dict[str, bool | int]:
        """HAS_*, whether a bf16 token enters products as it is, and the clusters listed."""
        plain = self.x.dtype == torch.bfloat16 and (self.has_order or not self.has_scale)
        return {
            "HAS_SCALE": self.has_scale,
            "HAS_MASK": self.has_mask,
            "SORTED": self.has_order,
            "PLAIN_BF16": plain,
            "BC": triton.next_power_of_2(self.scale.shape[0]) if self.listed else 0,
        }

    def blocks(self, size: int) -> int:
        """How many blocks of this many tokens there are, in their own order or sorted."""
        return triton.cdiv(self.place.numel() if self.has_order else self.x.shape[0], size)


@triton.jit
def load_scaled(
    x_ptr, scale_ptr, cluster, t, row, kept, d, D, HAS_SCALE: tl.constexpr, SORTED: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """float32 tokens, zeros where masked: from int64 `row` on, or those of t if sorted.

    In their own order they are rescaled here; a sorted block's scale is left to the caller.
    """
    known = kept[:, None] & (d[None, :] < D)
    if SORTED:
        at = t.to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=known, other=0.0).to(tl.float32)
    else:
        at = tl.arange(0, BT)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + row * D + at, mask=known, other=0.0).to(tl.float32)
        if HAS_SCALE:
            known &= (cluster >= 0)[:, None]
            x *= tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=known, other=1.0)
    return x


@triton.jit
def load_scale(scale_ptr, cluster, d, D):
    """(BD,) the scale of a sorted block: ones if its tokens are in no cluster."""
    known = d < tl.where(cluster >= 0, D, 0)
    return tl.load(scale_ptr + cluster * D + d, mask=known, other=1.0)


@triton.jit
def load_limits(cluster_ptr, C, BC: tl.constexpr):
    """(BC,) where the places of each listed cluster end."""
    limit = C
    if BC > 0:
        c = tl.arange(0, BC)
        end = tl.load(cluster_ptr + c, mask=c < C, other=0)
        limit = tl.where(c < C, tl.cdiv(end, STRETCH) * STRETCH, 0x7FFFFFFF)
    return limit


@triton.jit
def load_tokens(
    cluster_ptr, mask_ptr, place_ptr, limit, start, T, C, HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr, SORTED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The tokens of a block: which they are, exist, and are not masked; and clusters, -1 for none.

    Sorted, all are in one cluster: that which follows those that end before, or that of the first.
    The former (`limit`, of `load_limits`) is known before the tokens are.
    """
    t = start + tl.arange(0, BT)
    cluster = t
    if SORTED:
        t = tl.load(place_ptr + t)
        known = t >= 0
        if BC > 0:
            cluster = tl.sum((limit <= start).to(tl.int32))
        else:
            first = tl.load(place_ptr + start)
            cluster = tl.load(cluster_ptr + first, mask=first >= 0, other=-1).to(tl.int32)
    else:
        known = t < T
    kept = known
    if HAS_MASK:
        kept &= tl.load(mask_ptr + t, mask=known, other=0) != 0
    if HAS_SCALE:
        if not SORTED:
            cluster = tl.load(cluster_ptr + t, mask=kept, other=-1).to(tl.int32)
        cluster = tl.where(cluster < C, cluster, -1)
    return t, known, kept, cluster
