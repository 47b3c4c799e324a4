"""The order of tokens sorted by cluster, packed in one tensor (`RoutingState.order`).

Kernels read tiles of ALIGNMENT slots whose tokens share a cluster. Each cluster therefore begins at
a multiple of ALIGNMENT slots; a slot holds the index of a token, or -1 as padding. Many small
clusters would leave most slots empty: they follow each other without gaps (`alignment`), for the
statistics alone.

T tokens, C clusters, X slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.ops.device_support import interpreting
from acmoe.ops.empty import no_elements

ALIGNMENT = 64  # slots; the height of the kernels' tiles
_HEADER = 32  # entries; `begin` and `end` are padded to multiples of it, so that slots are aligned
# Below this many tokens per cluster the gaps between clusters cost more than sorting saves.
FEWEST_TOKENS = 128
# With more clusters than these the statistics of unsorted tokens read the tokens twice for every
# MANY_CLUSTERS: sorting saves more, down to FEWEST_OF_MANY tokens per cluster. At 512 clusters of
# 32 tokens (qwen3next, H200) they take 587 us unsorted and 53 sorted.
MANY_CLUSTERS, FEWEST_OF_MANY = 128, 32
# Slots of a sort without gaps are padded to a multiple of this: no kernel's tile is higher.
_WITHOUT_GAPS = 128


class TokenOrder(NamedTuple):
    """The parts of a packed order, as views of it."""

    token: Tensor  # (X,) int32 token in each slot, ascending in a cluster; -1 for none
    begin: Tensor  # (C + 1,) int32 first slot of each cluster; entry C: tokens in no cluster
    end: Tensor  # (C + 1,) int32 slot after each cluster's last token

    @classmethod
    def unpack(cls, order: Tensor, num_clusters: int) -> "TokenOrder | None":
        """Return the parts of a packed order, or None if it is empty (tokens not sorted)."""
        if order.numel() == 0:
            return None
        header, number = header_size(num_clusters), num_clusters + 1
        return cls(order[2 * header :], order[:number], order[header : header + number])

    @classmethod
    def new(
        cls, num_tokens: int, num_clusters: int, device: torch.device
    ) -> tuple[Tensor, "TokenOrder"]:
        """Allocate an uninitialised order; return the packed tensor and its parts."""
        header = header_size(num_clusters)
        size = 2 * header + num_slots(num_tokens, num_clusters)
        packed = torch.empty(size, dtype=torch.int32, device=device)
        parts = cls.unpack(packed, num_clusters)
        assert parts is not None
        return packed, parts


def header_size(num_clusters: int) -> int:
    """Return the padded size of `begin` and of `end`."""
    return -(-(num_clusters + 1) // _HEADER) * _HEADER


def alignment(num_tokens: int, num_clusters: int) -> int:
    """Return the number of slots at whose multiples clusters begin: ALIGNMENT, or 1 for no gaps."""
    small = num_clusters > MANY_CLUSTERS and num_tokens < FEWEST_TOKENS * num_clusters
    return 1 if small else ALIGNMENT


def num_slots(num_tokens: int, num_clusters: int) -> int:
    """Return X, the slots needed if each cluster leaves up to `alignment` - 1 slots unused."""
    if alignment(num_tokens, num_clusters) == 1:
        return -(-num_tokens // _WITHOUT_GAPS) * _WITHOUT_GAPS
    return (-(-num_tokens // ALIGNMENT) + num_clusters) * ALIGNMENT


def no_order(like: Tensor) -> Tensor:
    """Return the order of unsorted tokens: an empty int32 tensor on the device of `like`."""
    return no_elements((0,), torch.int32, like)


def order_is_read(cluster: Tensor) -> bool:
    """Return True if kernels of that device read an order, as Triton's do."""
    return not cluster.is_cpu or interpreting()


def worth_sorting(num_tokens: int, num_clusters: int) -> bool:
    """Return True if clusters are large enough on average for the sorted kernels to be faster."""
    fewest = FEWEST_OF_MANY if num_clusters > MANY_CLUSTERS else FEWEST_TOKENS
    return num_tokens >= fewest * num_clusters


def worth_routing_sorted(num_tokens: int, num_clusters: int) -> bool:
    """Return True if the router, too, is faster with tokens that are sorted already.

    Without gaps a tile has several scales, and gathering rows was slower, although equal scales
    came from L1: at qwen3next (H200) the route took 508 us instead of 474, the embedding's gradient
    462 instead of 323.
    """
    return alignment(num_tokens, num_clusters) == ALIGNMENT
