"""Dispersion and scale (B, C, D) of many sets of tokens, such as sequences, in one launch.

A program owns one cluster of one set: it finds the cluster's tokens (set_lists.py), sums them, sums
their deviations, and runs the epilogue (epilogue.py). Most lists are short: sequences of 512 tokens
have 32 in each of 16 clusters, and one in each of 512. A step of BT tokens stays in registers, so
that a list of up to BT tokens is read once; longer ones are read again from the cache.

    x is read once (T D itemsize bytes), and the scale written once (4 B C D bytes)

If nothing but the scale is wanted, a cluster with too few tokens gets its ones at once: neither its
tokens nor a dispersion are read or written.

Tokens are taken relative to the first one of their list, as in ../reference.py, and summed in
float32: equal tokens deviate by exactly 0, and a common offset costs no digits. Sums run in a fixed
order.

B sets of L tokens, T = B L tokens, D features, C clusters.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import launch, next_power_of_2
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics.triton.dispersion import POISON
from acmoe.ops.statistics.triton.epilogue import Epilogue, Outputs, cluster_epilogue
from acmoe.ops.statistics.triton.set_lists import list_tokens_of, tokens_in_order

# Most elements of a step: 16 for each of 256 threads. Twice as many took 112 us instead of 93 at
# qwen3next, and 126 instead of 108 at olmoe (captured, H200).
TILE = 4096
STEPS = (2, 32)  # fewest and most tokens of a step
SEARCH = (64, 1024)  # fewest and most tokens that are compared at once to find a list


class SetTokens(NamedTuple):
    """Sets of tokens, and what is known of their clusters: the order, or the cluster of each."""

    x: Tensor  # (B, L, D)
    token: Tensor  # (X,) int32: the tokens of the order, or memory (B * L,) for the lists
    begin: Tensor | None  # (C + 1,) int32, the order's; None: without an order
    end: Tensor | None
    assignment: Tensor  # (B, L) the cluster of each token; read without an order
    mask: Tensor | None  # (B, L) bool; read without an order
    num_clusters: int
    measure: str  # mad or square

    @classmethod
    def of(
        cls,
        x: Tensor,
        assignment: Tensor,
        mask: Tensor | None,
        order: Tensor | None,
        num_clusters: int,
        measure: str,
    ) -> "SetTokens":
        """Return the sets; order: the packed `TokenOrder` of all tokens, or None."""
        sorted_tokens = None if order is None else TokenOrder.unpack(order, num_clusters)
        if sorted_tokens is None:
            token = torch.empty(assignment.numel(), dtype=torch.int32, device=x.device)
            return cls(x, token, None, None, assignment, mask, num_clusters, measure)
        return cls(x, *sorted_tokens, assignment, None, num_clusters, measure)


class Tile(NamedTuple):
    """Tokens of a step, and warps."""

    tokens: int
    num_warps: int


def launch_table(dim: int, tokens_per_list: int) -> Tile:
    """Choose the tile: a step for a list of average length, 16 elements for each thread."""
    width = max(16, next_power_of_2(dim))
    fewest, most = STEPS
    wanted = max(fewest, min(most, next_power_of_2(max(1, tokens_per_list))))
    tokens = max(1, min(wanted, TILE // width))
    return Tile(tokens, max(1, min(16, tokens * width // 512)))


def measure_sets(sets: SetTokens, outputs: Outputs, epilogue: Epilogue) -> None:
    """Measure every cluster of every set, and run the epilogue.

    outputs.dispersion may be None if the result is "scale".
    """
    B, L, D = sets.x.shape
    C = sets.num_clusters
    tile = launch_table(D, L // C)
    fewest, most = SEARCH
    # An order is searched among the tokens of a cluster, lists are made of those of a set.
    compared = L if sets.begin is None else 2 * B * L // C
    assignment = sets.assignment.contiguous()
    mask = assignment if sets.mask is None else sets.mask.contiguous().view(torch.uint8)
    launch(
        _set_kernel, (B * C,), sets.x.contiguous(), sets.token, sets.begin, sets.end, assignment,
        mask, outputs.dispersion, outputs.count, outputs.out, L, D, C, *epilogue.numbers,
        MEASURE=sets.measure, **epilogue.flags, HAS_MASK=sets.mask is not None,
        BL=max(fewest, min(most, next_power_of_2(compared))), BT=tile.tokens,
        BD=max(16, next_power_of_2(D)), num_warps=tile.num_warps,
    )  # fmt: skip


@triton.jit
def _rows_of(x_ptr, token_ptr, start, last, anchor, d, D, BT: tl.constexpr):
    """Load the (BT, BD) tokens of slots start to start + BT less the anchor; 0 from `last` on."""
    slot = start + tl.arange(0, BT)
    token = tl.load(token_ptr + slot, mask=slot < last, other=0).to(tl.int64)
    valid = (slot < last)[:, None] & (d[None, :] < D)
    x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=valid, other=0.0)
    return tl.where(valid, x.to(tl.float32) - anchor[None, :], 0.0)


@triton.jit
def _summed(y, mean, start, last, MEASURE: tl.constexpr, BT: tl.constexpr):
    """Return the (BD,) sum of |y - mean| or (y - mean)^2 over the slots before `last`."""
    inside = start + tl.arange(0, BT) < last
    deviation = tl.where(inside[:, None], y - mean[None, :], 0.0)
    return tl.sum(tl.abs(deviation) if MEASURE == "mad" else deviation * deviation, axis=0)


@triton.jit
def _deviations(
    x_ptr, token_ptr, first, last, d, D, MEASURE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Return the (BD,) sum of the deviations of a list from its mean; 0 for an empty list."""
    exists = tl.where(last > first, D, 0)
    token = tl.load(token_ptr + first, mask=last > first, other=0).to(tl.int64)
    anchor = tl.load(x_ptr + token * D + d, mask=d < exists, other=0.0).to(tl.float32)
    final = first + (tl.maximum(last - first, 1) - 1) // BT * BT  # the step that stays in registers
    total = tl.zeros((BD,), dtype=tl.float32)
    for start in range(first, final, BT):
        total += tl.sum(_rows_of(x_ptr, token_ptr, start, last, anchor, d, D, BT), axis=0)
    held = _rows_of(x_ptr, token_ptr, final, last, anchor, d, D, BT)
    mean = (total + tl.sum(held, axis=0)) / tl.maximum(last - first, 1).to(tl.float32)
    spread = _summed(held, mean, final, last, MEASURE, BT)
    for start in range(first, final, BT):
        y = _rows_of(x_ptr, token_ptr, start, last, anchor, d, D, BT)
        spread += _summed(y, mean, start, last, MEASURE, BT)
    # NaN and inf stay in their feature here; epilogue.py extends them to the whole cluster.
    return tl.where(spread < POISON, spread, POISON)


@triton.jit
def _set_kernel(
    x_ptr, token_ptr, begin_ptr, end_ptr, assignment_ptr, mask_ptr, dispersion_ptr, count_ptr,
    out_ptr, L, D, C, floor, eps, min_tokens, MEASURE: tl.constexpr, ROOT: tl.constexpr,
    RESULT: tl.constexpr, HAS_MASK: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Measure one cluster of one set. Consecutive programs have clusters of the same set."""
    row = tl.program_id(0).to(tl.int64)
    set_id, cluster = tl.program_id(0) // C, tl.program_id(0) % C
    if begin_ptr is None:
        first, last = list_tokens_of(
            assignment_ptr, mask_ptr, token_ptr, set_id, cluster, L, C, HAS_MASK, BL
        )
    else:
        first, last = tokens_in_order(token_ptr, begin_ptr, end_ptr, set_id, cluster, L, BL)
    d = tl.arange(0, BD)
    tokens = last - first
    if dispersion_ptr is None:  # the scale alone is wanted
        if tokens < min_tokens:
            tl.store(out_ptr + row * D + d, tl.full((BD,), 1.0, dtype=tl.float32), mask=d < D)
            tl.store(count_ptr + row, tokens.to(tl.float32))
            return
    spread = _deviations(x_ptr, token_ptr, first, last, d, D, MEASURE, BT, BD)
    cluster_epilogue(
        spread.to(tl.float64), tokens, row, d, D, dispersion_ptr, count_ptr, out_ptr, None, None,
        None, floor, eps, min_tokens, ROOT, RESULT,
    )  # fmt: skip
