"""The memory of streams in preallocated buffers, whose addresses stay the same in all updates.

A block attends to memory and segment in one tensor. A `StaticMemory` has a buffer for both: the
segment is written after the memory, and the end of the same buffer is the next memory. An update
then copies the memory once, to move it to the front, instead of twice (into a concatenated tensor,
and from there to the address that a captured CUDA graph reads).

K blocks, B streams, S positions of memory, L of a segment, D features, N = S + L.
"""

import torch
from torch import Tensor

from acmoe.fast.rows import copy_rows
from acmoe.models.text.memory import (
    ConcatMemory,
    ContextMemory,
    Memory,
    Moments,
    SegmentCaches,
    StreamMemory,
)
from acmoe.ops.statistics.prefix import PrefixMoments


class StaticMemory:
    """Buffers for memories shaped as `like`, each followed by space for a segment of `length`.

    length=0 leaves no space for segments; `extend` then concatenates them to the memory.
    """

    def __init__(self, like: StreamMemory, length: int, dtype: torch.dtype) -> None:
        first_BSD = like.hidden[0]
        streams, self.positions, dim = first_BSD.shape
        self.length = length
        # One tensor for all blocks, so that one launch moves all of them. `.data` gives the part of
        # each block its own version counter: for autograd, a write to one does not change others.
        shape = (len(like.hidden), streams, self.positions + length, dim)
        self.buffer_KBND = first_BSD.new_empty(shape, dtype=dtype)
        self.buffers = tuple(buffer_BND.data for buffer_BND in self.buffer_KBND)
        self.hidden = tuple(buffer_BND[:, : self.positions] for buffer_BND in self.buffers)
        self.mask = like.mask
        self.moments: Moments = ()

    def open(self, span: int, caches: SegmentCaches = ()) -> "OpenStaticMemory":
        """Begin a call, which will write its segment after the memory."""
        return OpenStaticMemory(self, span, caches)

    def hold(self, new: StreamMemory) -> "StaticMemory":
        """Copy `new` to the front of the buffers.

        A backward that still needs their previous content raises.
        """
        if new is self or new.hidden[0].data_ptr() == self.hidden[0].data_ptr():
            pass
        elif new.hidden[0].data_ptr() == self.buffer_KBND[:, :, self.length :].data_ptr():
            self._move_to_front()
        else:
            for buffer, hidden in zip(self.hidden, new.hidden, strict=True):
                copy_rows(buffer, hidden.to(buffer.dtype))
        self.mask = new.mask
        self._hold_moments(new.moments)
        return self

    def _hold_moments(self, new: Moments) -> None:
        """Copy the moments of prefix statistics; the first that come are given their place."""
        if not self.moments:
            self.moments = tuple(
                None if one is None else PrefixMoments(*(part.clone() for part in one))
                for one in new
            )
            return
        for depth, held in enumerate(self.moments):
            one = new[depth] if new else None
            for number, part in enumerate(held or ()):
                if one is None:
                    part.zero_()
                elif one[number] is not part:
                    part.copy_(one[number])

    def _move_to_front(self) -> None:
        """Move the end of the buffers to their front, in steps of a segment's length.

        The source and destination of a step do not overlap, and what a step overwrites was moved
        by an earlier one.
        """
        for first in range(0, self.positions, self.length):
            end = min(first + self.length, self.positions)
            read_KBLD = self.buffer_KBND[:, :, first + self.length : end + self.length]
            copy_rows(self.buffer_KBND[:, :, first:end], read_KBLD)
        torch.autograd.graph.increment_version(self.buffers)


class OpenStaticMemory(ContextMemory):
    """A `StaticMemory` during one call."""

    def __init__(self, memory: StaticMemory, span: int, caches: SegmentCaches = ()) -> None:
        super().__init__(span, caches)
        self.memory = memory

    def extend(self, depth: int, x: Tensor) -> Tensor:
        """Write x after the memory of block `depth` and return its buffer (B, S + L, D).

        If x does not fit the buffer or requires a gradient, return a concatenated tensor instead.
        """
        buffer, first = self.memory.buffers[depth], self.memory.positions
        if x.requires_grad or x.dtype != buffer.dtype or buffer[:, first:].shape != x.shape:
            context = torch.cat([self.memory.hidden[depth].to(x.dtype), x], dim=1)
        else:
            copy_rows(buffer[:, first:], x)
            context = buffer
        return self.remember(context)

    def concatenating(self) -> ConcatMemory:
        """Return the same memory opened as a `ConcatMemory`, which does not write to the buffers.

        Both share the list of contexts, so `next_memory` works on either.
        """
        memory = Memory(self.memory.hidden, self.memory.mask)
        opened = ConcatMemory(memory, self.span, self.caches)
        self.contexts = opened.contexts
        return opened
