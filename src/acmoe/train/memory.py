"""The memory of streams whose windows are full, kept in one place from update to update.

A model attends to memory and segment in one tensor. With room behind the memory it writes the
segment there, and the next memory is the same tensor's end. So an update copies the memory once, to
move it up to the front, and not twice, into a joined tensor and from that to where it is kept.

K blocks, B streams, S positions of memory, L of a segment, D features, N = S + L.
"""

import torch

from acmoe.models.text.decoder import Memory
from acmoe.ops.rows import copy_rows


class HeldMemory:
    """A place for memories like this one, and for segments of `length` behind them; 0: no room, for
    models that join a tensor of their own."""

    def __init__(self, like: Memory, length: int, dtype: torch.dtype) -> None:
        first_BSD = like.hidden[0]
        streams, self.positions, dim = first_BSD.shape
        self.length = length
        # One tensor for all blocks, so that they move up in a launch a segment; parts with versions
        # of their own, so that autograd does not take one block's writing for another's change.
        shape = (len(like.hidden), streams, self.positions + length, dim)
        self.room_KBND = first_BSD.new_empty(shape, dtype=dtype)
        self.rooms = tuple(room_BND.data for room_BND in self.room_KBND)
        hidden = tuple(room_BND[:, : self.positions] for room_BND in self.rooms)
        self.memory = Memory(hidden, like.mask, self.rooms if length > 0 else None)

    def hold(self, new: Memory) -> Memory:
        """`new`, in this place; a backward that reads what the room held before then raises."""
        kept = self.memory.hidden
        if new.hidden[0].data_ptr() == kept[0].data_ptr():
            pass
        elif new.hidden[0].data_ptr() == self.room_KBND[:, :, self.length :].data_ptr():
            self._move_up()
        else:
            for into, hidden in zip(kept, new.hidden, strict=True):
                copy_rows(into, hidden.to(into.dtype))
        return self.memory._replace(mask=new.mask)

    def _move_up(self) -> None:
        """The room's end to its beginning, in strips that a segment is long: none overlaps what is
        read with it, and each has been read when it is written."""
        for first in range(0, self.positions, self.length):
            end = min(first + self.length, self.positions)
            read_KBLD = self.room_KBND[:, :, first + self.length : end + self.length]
            copy_rows(self.room_KBND[:, :, first:end], read_KBLD)
        torch.autograd.graph.increment_version(self.rooms)
