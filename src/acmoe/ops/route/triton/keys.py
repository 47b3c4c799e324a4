"""Affinities as whole numbers of the same order, by which the router's kernels select experts."""

import triton
import triton.language as tl

# Key below that of every affinity, -inf included: an expert already selected or out of range.
TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def affinity_keys(affinity):
    """Return int32 keys in the order of float32 affinities. NaN is highest, as in torch.topk."""
    bits = (affinity + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0.0 into 0.0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(affinity != affinity, 0x7FFFFFFF, key)


@triton.jit
def affinity_of(key):
    """Return the affinity with this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
