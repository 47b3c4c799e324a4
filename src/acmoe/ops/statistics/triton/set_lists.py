"""Find the tokens of one cluster of one set of tokens, inside the kernel that measures them.

Either of two things is known (set_dispersion.py):

    order      all tokens sorted by cluster (ops/sort/order.py). The sort is stable, so the tokens
               of a cluster ascend, and those of a set lie side by side: two searches find them.
    clusters   the cluster of each token. The program lists its own tokens in memory, behind those
               of the set's lower clusters: it reads the set's clusters twice, L numbers each time.

B sets of L tokens, C clusters.
"""

import triton
import triton.language as tl

from acmoe.ops.statistics.triton.dispersion import load_cluster

_LAST = tl.constexpr(2**31 - 1)  # above every token


@triton.jit
def tokens_in_order(token_ptr, begin_ptr, end_ptr, set_id, cluster, L, BL: tl.constexpr):
    """Return the first slot of a set's tokens in a cluster of the order, and the slot after."""
    begin, end = tl.load(begin_ptr + cluster), tl.load(end_ptr + cluster)
    first = _first_not_below(token_ptr, begin, end, set_id * L, BL)
    return first, _first_not_below(token_ptr, first, tl.minimum(end, first + L), set_id * L + L, BL)


@triton.jit
def _first_not_below(token_ptr, begin, end, limit, BL: tl.constexpr):
    """Return the first slot from begin to end whose token is not below `limit`; `end` if none.

    Tokens ascend. Up to BL of them are compared at once; of more, every `step`-th one is, and then
    those after the last that is below the limit.
    """
    i = tl.arange(0, BL)
    step = tl.maximum((end - begin + BL - 1) // BL, 1)
    at = begin + i * step
    below = tl.sum((tl.load(token_ptr + at, mask=at < end, other=_LAST) < limit).to(tl.int32))
    slot = begin + below
    if step > 1:
        slot = begin + tl.maximum(below - 1, 0) * step
        stop = tl.minimum(slot + step, end)
        for start in range(slot, stop, BL):
            at = start + i
            token = tl.load(token_ptr + at, mask=at < stop, other=_LAST)
            slot += tl.sum((token < limit).to(tl.int32))
    return slot


@triton.jit
def list_tokens_of(
    assignment_ptr, mask_ptr, token_ptr, set_id, cluster, L, C, HAS_MASK: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Write the tokens of a cluster of a set; return their first slot, and the slot after."""
    i = tl.arange(0, BL)
    row = set_id.to(tl.int64) * L
    lower = tl.zeros((BL,), dtype=tl.int32)
    for start in range(0, L, BL):
        at = start + i
        other = load_cluster(assignment_ptr, mask_ptr, row + at, at < L, HAS_MASK)
        lower += ((other >= 0) & (other < cluster)).to(tl.int32)
    first = set_id * L + tl.sum(lower)
    slot = first
    for start in range(0, L, BL):
        at = start + i
        own = load_cluster(assignment_ptr, mask_ptr, row + at, at < L, HAS_MASK) == cluster
        rank = tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(token_ptr + slot + rank, set_id * L + at, mask=own)
        slot += tl.sum(own.to(tl.int32))
    tl.debug_barrier()  # other threads of this program read what was written
    return first, slot
