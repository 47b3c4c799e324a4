"""Find the last chosen cluster in two launches: the Triton form of ../chosen.py.

    last   each program finds the highest id among its share of the ids
    mark   one program finds the highest of these, and marks the clusters up to it

T tokens, C clusters, K experts and J clusters of each token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2

_BLOCK = 1024  # ids of each of both tensors that a program reads at a time
_PROGRAMS = 256


def launch_up_to_last(
    expert_ids_TK: Tensor, assignment_TJ: Tensor, num_clusters: int, mask_T: Tensor | None
) -> Tensor:
    """Return (C,) True for the clusters up to the last one among the tokens' ids."""
    (N, K), J = expert_ids_TK.shape, assignment_TJ.shape[1]
    ids, own = expert_ids_TK.contiguous(), assignment_TJ.contiguous()
    mask = ids if mask_T is None else mask_T.contiguous().view(torch.uint8)
    programs = min(_PROGRAMS, cdiv(N * max(K, J), _BLOCK))
    last = torch.empty(programs, dtype=torch.int32, device=ids.device)
    found = torch.empty(num_clusters, dtype=torch.uint8, device=ids.device)
    launch(
        _last_kernel, (programs,), ids, own, mask, last, N, K, J, num_clusters, programs,
        HAS_MASK=mask_T is not None, BN=_BLOCK, num_warps=4,
    )  # fmt: skip
    launch(
        _mark_kernel, (1,), last, found, num_clusters, programs,
        BC=next_power_of_2(num_clusters), BP=next_power_of_2(programs), num_warps=4,
    )  # fmt: skip
    return found.view(torch.bool)


@triton.jit
def _highest(ids_ptr, mask_ptr, at, N, K, C, HAS_MASK: tl.constexpr):
    """Return the ids at places of (N, K); -1 for those that mean "none" or are of masked tokens."""
    inside = at < N * K
    found = tl.load(ids_ptr + at, mask=inside, other=-1)
    counted = (found >= 0) & (found < C)
    if HAS_MASK:
        counted &= tl.load(mask_ptr + at // K, mask=inside, other=0) != 0
    return tl.where(counted, found, -1).to(tl.int32)


@triton.jit
def _last_kernel(
    ids_ptr, own_ptr, mask_ptr, last_ptr, N, K, J, C, programs, HAS_MASK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Store the highest id of this program's blocks of expert ids and of clusters."""
    highest = tl.full((BN,), -1, dtype=tl.int32)
    for start in range(tl.program_id(0) * BN, N * tl.maximum(K, J), programs * BN):
        at = start + tl.arange(0, BN)
        highest = tl.maximum(highest, _highest(ids_ptr, mask_ptr, at, N, K, C, HAS_MASK))
        highest = tl.maximum(highest, _highest(own_ptr, mask_ptr, at, N, J, C, HAS_MASK))
    tl.store(last_ptr + tl.program_id(0), tl.max(highest))


@triton.jit
def _mark_kernel(last_ptr, found_ptr, C, programs, BC: tl.constexpr, BP: tl.constexpr):
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    last = tl.max(tl.load(last_ptr + p, mask=p < programs, other=-1))
    tl.store(found_ptr + c, (c <= last).to(tl.uint8), mask=c < C)
