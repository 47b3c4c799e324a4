"""Token loads shared by the router's kernels: unsorted tokens, or tokens sorted by cluster.

A block of BT tokens is either BT consecutive rows of x (T, D), each with the scale of its own
cluster, or BT slots of a cluster-sorted permutation (ops/sort/triton/sort.py), whose clusters are
padded to multiples of ALIGNMENT slots, so that all tokens of a block share one cluster and one
scale.

T tokens, D features, C clusters, X slots of the padded permutation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, next_power_of_2
from acmoe.ops.sort.order import ALIGNMENT

CLUSTER_ALIGNMENT = tl.constexpr(ALIGNMENT)
# Each warp holds up to this many cluster ends in its own registers, so that finding a block's
# cluster needs no barrier. (With 64 clusters warps wait for each other: the embedding's gradient of
# olmoe takes 90 us instead of 63, H200.)
MAX_CLUSTER_ENDS = 32


class Tokens(NamedTuple):
    """Tensors and flags that every router kernel takes; x is passed for a tensor that is absent."""

    x: Tensor  # (T, D)
    scale: Tensor  # (C, D) float32
    # (T,) cluster of each token, any id outside 0 to C-1 for none; or, for sorted tokens of few
    # clusters, (C + 1,) slot after the last token of each cluster
    cluster: Tensor
    mask: Tensor  # (T,) uint8
    permutation: Tensor  # (X,) int32 token of each slot, -1 for padding
    has_scale: bool
    has_mask: bool
    is_sorted: bool
    has_cluster_ends: bool  # `cluster` holds the (C + 1,) ends
    is_split: bool = False  # x is a bf16x2 split (T, 2 * D) of rescaled tokens (rescale.py)

    @classmethod
    def of(
        cls,
        x: Tensor,
        scale: Tensor | None,
        assignment: Tensor | None,
        mask: Tensor | None,
        permutation: Tensor | None,
        end: Tensor | None,
    ) -> "Tokens":
        """Collect the arguments; tokens are sorted where a scale and a permutation are given."""
        x = x.contiguous()
        has_cluster_ends = (
            scale is not None and end is not None and end.numel() - 1 <= MAX_CLUSTER_ENDS
        )
        cluster = end if has_cluster_ends else assignment
        return cls(
            x,
            x if scale is None else scale.contiguous(),
            x if cluster is None else cluster.contiguous(),
            x if mask is None else mask.contiguous().view(torch.uint8),
            x if permutation is None else permutation,
            scale is not None,
            mask is not None,
            scale is not None and permutation is not None,
            has_cluster_ends,
        )

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """Return the five tensors, in the order of the kernels' first arguments."""
        return self[:5]

    @property
    def flags(self) -> dict[str, bool | int]:
        """Compile-time flags of the kernels.

        PLAIN_BF16: x is bf16 and is not rescaled per token, so that it enters GEMMs without a
        split.
        BC: width of the register vector of cluster ends, 0 where `cluster` holds assignments.
        """
        rescaled = self.is_split or (self.has_scale and not self.is_sorted)
        plain_bf16 = self.x.dtype == torch.bfloat16 and not rescaled
        return {
            "HAS_SCALE": self.has_scale,
            "HAS_MASK": self.has_mask,
            "SORTED": self.is_sorted,
            "PLAIN_BF16": plain_bf16,
            "BC": next_power_of_2(self.scale.shape[0]) if self.has_cluster_ends else 0,
        }

    def blocks(self, size: int) -> int:
        """Number of blocks of `size` tokens, or of `size` slots if tokens are sorted."""
        return cdiv(self.permutation.numel() if self.is_sorted else self.x.shape[0], size)

    def in_place(self) -> "Tokens":
        """Return the tokens in their own order and without a scale."""
        return self._replace(has_scale=False, is_sorted=False, has_cluster_ends=False)


@triton.jit
def load_scaled(
    x_ptr, scale_ptr, cluster, t, row, unmasked, d, D, HAS_SCALE: tl.constexpr,
    SORTED: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Load a (BT, BD) float32 tile of tokens, zeros at masked ones.

    Unsorted tokens are the rows from int64 `row` on and are multiplied by their scale here. Sorted
    tokens are the rows t; their common scale is left to the caller.
    """
    valid = unmasked[:, None] & (d[None, :] < D)
    if SORTED:
        offs = t.to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + offs, mask=valid, other=0.0).to(tl.float32)
    else:
        offs = tl.arange(0, BT)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + row * D + offs, mask=valid, other=0.0).to(tl.float32)
        if HAS_SCALE:
            x *= load_own_scale(scale_ptr, cluster, unmasked, d, D)
    return x


@triton.jit
def load_split(x_ptr, row, unmasked, d, D, BT: tl.constexpr):
    """Load the (BT, BD) high and low bf16 parts of tokens that are a bf16x2 split."""
    valid = unmasked[:, None] & (d[None, :] < D)
    offs = tl.arange(0, BT)[:, None] * (2 * D) + d[None, :]
    x_ptr += row * 2 * D
    high = tl.load(x_ptr + offs, mask=valid, other=0.0)
    return high, tl.load(x_ptr + D + offs, mask=valid, other=0.0)


@triton.jit
def load_own_scale(scale_ptr, cluster, unmasked, d, D):
    """Load the (BT, BD) scales of unsorted tokens; ones where masked or in no cluster."""
    valid = (unmasked & (cluster >= 0))[:, None] & (d[None, :] < D)
    return tl.load(scale_ptr + cluster[:, None] * D + d[None, :], mask=valid, other=1.0)


@triton.jit
def load_scale(scale_ptr, cluster, d, D):
    """Load the (BD,) scale of a sorted block; ones if its tokens are in no cluster."""
    valid = d < tl.where(cluster >= 0, D, 0)
    return tl.load(scale_ptr + cluster * D + d, mask=valid, other=1.0)


@triton.jit
def load_cluster_ends(cluster_ptr, C, BC: tl.constexpr):
    """Load the (BC,) padded ends of the clusters (first slot after each); C if BC is 0."""
    ends = C
    if BC > 0:
        c = tl.arange(0, BC)
        end = tl.load(cluster_ptr + c, mask=c < C, other=0)
        ends = tl.where(c < C, tl.cdiv(end, CLUSTER_ALIGNMENT) * CLUSTER_ALIGNMENT, 0x7FFFFFFF)
    return ends


@triton.jit
def load_tokens(
    cluster_ptr, mask_ptr, perm_ptr, ends, start, T, C, HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr, SORTED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return a block's token indices, in-bounds mask, unmasked mask, and clusters (-1 for none).

    The cluster is one per token if unsorted, one scalar for the block if sorted. The scalar is the
    number of clusters that end at or before the block (BC > 0; `ends` of `load_cluster_ends`),
    which is known before the token indices arrive, or else the assignment of the block's first
    token.
    """
    t = start + tl.arange(0, BT)
    cluster = t
    if SORTED:
        t = tl.load(perm_ptr + t)
        in_bounds = t >= 0
        if BC > 0:
            cluster = tl.sum((ends <= start).to(tl.int32))
        else:
            first = tl.load(perm_ptr + start)
            cluster = tl.load(cluster_ptr + first, mask=first >= 0, other=-1).to(tl.int32)
    else:
        in_bounds = t < T
    unmasked = in_bounds
    if HAS_MASK:
        unmasked &= tl.load(mask_ptr + t, mask=in_bounds, other=0) != 0
    if HAS_SCALE:
        if not SORTED:
            cluster = tl.load(cluster_ptr + t, mask=unmasked, other=-1).to(tl.int32)
        cluster = tl.where(cluster < C, cluster, -1)
    return t, in_bounds, unmasked, cluster
