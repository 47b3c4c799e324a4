"""The memory of a stream: hidden states of earlier segments that its next segment attends to, and
the moments of all earlier tokens, where routers take prefix statistics.

A model opens a memory for one call. The opened memory has three methods:

    extend(depth, x)     the context of block `depth`: its inputs at earlier positions, then x
    cache(depth)         the block's cache: for decoding, or of prefix statistics; None if neither
    next_memory(mask)    the memory for the next segment

Three kinds exist: `ConcatMemory` and `DecodeCache` below, and `StaticMemory` in preallocated
buffers (acmoe/fast/memory.py).

Shapes: B batch, L length of the segment, S positions of memory, N cached and new positions,
D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acmoe.models.text.cache import BlockCache, SegmentCache, SlidingStore
from acmoe.ops.statistics.prefix import PrefixMoments

Moments = tuple[PrefixMoments | None, ...]  # one entry per block; empty: no block has any
SegmentCaches = Sequence[SegmentCache | None]  # one entry per block; empty: no block has any


class Memory(NamedTuple):
    """The hidden states of up to `span` previous positions, without gradient."""

    hidden: tuple[Tensor, ...]  # (B, S, D) inputs of each block
    mask: Tensor | None = None  # (B, S) False where a position is padding; None: all are tokens
    moments: Moments = ()  # for prefix statistics: over all earlier positions of each stream

    def open(self, span: int, caches: SegmentCaches = ()) -> "ConcatMemory":
        """Open the memory for one call; the next memory has up to `span` positions."""
        return ConcatMemory(self, span, caches)


class StreamMemory(Protocol):
    """A memory that a model can open for a call."""

    @property
    def hidden(self) -> tuple[Tensor, ...]: ...
    @property
    def mask(self) -> Tensor | None: ...
    @property
    def moments(self) -> Moments: ...
    def open(self, span: int, caches: SegmentCaches = ()) -> "OpenMemory": ...


class OpenMemory(Protocol):
    """A memory opened for one call; the module's docstring describes the methods."""

    def extend(self, depth: int, x: Tensor) -> Tensor: ...
    def cache(self, depth: int) -> BlockCache | None: ...
    def next_memory(self, mask: Tensor | None) -> Memory: ...


class ContextMemory:
    """An opened memory of hidden states. Its `extend`, in a subclass, adds to `contexts` the part
    of each block's context that the next memory holds."""

    def __init__(self, span: int, caches: SegmentCaches = ()) -> None:
        self.span = span
        self.caches = caches
        self.contexts: list[Tensor] = []

    def remember(self, context: Tensor) -> Tensor:
        """Keep the last `span` positions of the context for the next segment; return all of it."""
        self.contexts.append(context.detach()[:, -self.span :])
        return context

    def cache(self, depth: int) -> BlockCache | None:
        return self.caches[depth] if self.caches else None

    def next_memory(self, mask: Tensor | None) -> Memory:
        seen = None if mask is None else mask[:, -self.span :]
        return Memory(tuple(self.contexts), seen, _moments_after(self.caches))


class ConcatMemory(ContextMemory):
    """An opened memory that concatenates memory, if there is any, and segment."""

    def __init__(self, memory: Memory | None, span: int, caches: SegmentCaches = ()) -> None:
        super().__init__(span, caches)
        self.memory = memory

    def extend(self, depth: int, x: Tensor) -> Tensor:
        """Return the context (B, S + L, D) of block `depth`."""
        if self.memory is None:
            return self.remember(x)
        return self.remember(torch.cat([self.memory.hidden[depth].to(x.dtype), x], dim=1))


def _moments_after(caches: SegmentCaches) -> Moments:
    """Return the running moments of each block at the end of the segment; None: it keeps none."""
    return tuple(None if cache is None else cache.after for cache in caches)


@dataclass
class DecodeCache:
    """One `BlockCache` per block, and the mask of cached positions that are real tokens.

    It has the same interface as a memory of hidden states. It stores earlier positions as keys and
    values, in the cache of each block (cache.py).
    """

    blocks: list[BlockCache]
    mask: SlidingStore
    masked: bool = field(default=False)  # True once a call had a token mask

    def extend(self, depth: int, x: Tensor) -> Tensor:
        """Return x, the new positions alone; the block's cache holds the earlier ones."""
        return x

    def cache(self, depth: int) -> BlockCache:
        return self.blocks[depth]

    def next_memory(self, mask: Tensor | None) -> Memory:
        """Return an empty memory: the cache itself is used for the next call."""
        return Memory((), mask)

    def select(self, rows: Tensor) -> None:
        """Keep the given sequences of the batch, in this order, as beam search does."""
        self.mask.select(rows)
        for block in self.blocks:
            block.select(rows)

    def extend_mask(self, tokens_BL: Tensor, token_mask_BL: Tensor | None) -> Tensor | None:
        """Append tokens to the mask; return it (B, N), True at visible keys; None if all are."""
        real_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        self.masked = self.masked or token_mask_BL is not None
        view_BN = self.mask.extend(real_BL if token_mask_BL is None else token_mask_BL)
        return view_BN if self.masked else None
