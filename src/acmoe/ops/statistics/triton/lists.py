"""List the tokens of each cluster of each sequence in time order, for running sums (prefix.py).

    kept      the cluster of each token; a masked or non-finite token, or one in no cluster, gets C
    list      one program a cluster and sequence counts the tokens of lower clusters, which come
              first, and then writes the indices of its own
Memory traffic: x is read once, because a token with NaN or inf must not enter any sum.

B sequences of L tokens, N = B * L; D features, C clusters; S = B (C + 1) lists, the last one of
each sequence for tokens in no cluster.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

_TOKENS, _FEATURES = 4, 1024  # most of a step that looks for NaN and inf
_STEP = 1024  # most tokens of a step that lists them


class TokenLists(NamedTuple):
    """The tokens of each cluster of each sequence, in time order."""

    token: Tensor  # (N,) int32 index of the token in x (N, D)
    begin: Tensor  # (S + 1,) int32 where each list begins


def list_tokens(
    x_BLD: Tensor, assignment_BL: Tensor, mask_BL: Tensor | None, num_clusters: int
) -> TokenLists:
    """Return the lists of x; assignment: any id outside 0 to C - 1 for no cluster."""
    B, L, D = x_BLD.shape
    N, C = B * L, num_clusters
    cluster_N = torch.empty(N, dtype=torch.int32, device=x_BLD.device)
    lists = TokenLists(torch.empty_like(cluster_N), cluster_N.new_empty(B * (C + 1) + 1))
    assignment_BL = assignment_BL.contiguous()
    mask = assignment_BL if mask_BL is None else mask_BL.contiguous().view(torch.uint8)
    launch(
        _kept_kernel, (cdiv(N, _TOKENS),), x_BLD, assignment_BL, mask, cluster_N, N, D, C,
        HAS_MASK=mask_BL is not None, BT=_TOKENS, BD=min(_FEATURES, next_power_of_2(D)),
        num_warps=4,
    )  # fmt: skip
    launch(
        _list_kernel, (C + 1, B), cluster_N, *lists, L, C,
        BL=min(_STEP, next_power_of_2(L)), num_warps=4,
    )  # fmt: skip
    return lists


@triton.jit
def _kept_kernel(
    x_ptr, assignment_ptr, mask_ptr, cluster_ptr, N, D, C, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the clusters of BT tokens; C for a token that enters no statistics."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = t < N
    rows = x_ptr + t.to(tl.int64)[:, None] * D
    finite = tl.full((BT, BD), 1, dtype=tl.int1)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        valid = inside[:, None] & (d[None, :] < D)
        x = tl.load(rows + d[None, :], mask=valid, other=0.0).to(tl.float32)
        finite &= tl.abs(x) < float("inf")
    kept = tl.min(finite.to(tl.int32), axis=1) != 0
    if HAS_MASK:
        kept &= tl.load(mask_ptr + t, mask=inside, other=0) != 0
    cluster = tl.load(assignment_ptr + t, mask=inside, other=-1)
    kept &= (cluster >= 0) & (cluster < C)
    tl.store(cluster_ptr + t, tl.where(kept, cluster, C).to(tl.int32), mask=inside)


@triton.jit
def _list_kernel(cluster_ptr, token_ptr, begin_ptr, L, C, BL: tl.constexpr):
    """Write the tokens of one cluster of one sequence, and where its list begins."""
    cluster, sequence = tl.program_id(0), tl.program_id(1)
    cluster_ptr += sequence.to(tl.int64) * L
    lower = tl.zeros((BL,), dtype=tl.int32)
    for start in range(0, L, BL):
        at = start + tl.arange(0, BL)
        lower += (tl.load(cluster_ptr + at, mask=at < L, other=C) < cluster).to(tl.int32)
    first = sequence * L
    begin = first + tl.sum(lower)
    begin_ptr += sequence * (C + 1) + cluster
    tl.store(begin_ptr, begin)
    if cluster == C:  # each sequence's first list writes the same number again
        tl.store(begin_ptr + 1, first + L)
    for start in range(0, L, BL):
        at = start + tl.arange(0, BL)
        own = (tl.load(cluster_ptr + at, mask=at < L, other=C + 1) == cluster).to(tl.int32)
        tl.store(token_ptr + begin + tl.cumsum(own, axis=0) - own, first + at, mask=own != 0)
        begin += tl.sum(own)
