"""Record the launches of a call, and turn them into the steps of a tape (tape.py).

Memory is identified by a weak reference to its storage, which works after the storage was freed
too. So a recorded call keeps its memory no longer than any other call.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from acmoe.ops.device.launcher import Computation, Launch, recorder

# Memory from this size on is allocated before the first launch that uses it and freed after the
# last, so that a tape never holds more than the call that it repeats. All smaller memory of a call
# is one buffer. torch keeps separate pools below and above this size.
LARGE_BYTES = 2**20
_ALIGNMENT = 256
# Addresses of one argument that a tape remembers; layers of one shape share their tapes.
MOST_ADDRESSES = 512

Results = tuple[Tensor, ...]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class Pointer(NamedTuple):
    """An address: `offset` bytes after the begin of the memory number `slot`."""

    slot: int
    offset: int


class Operand(NamedTuple):
    """A tensor at a `Pointer`, for torch to compute with."""

    pointer: Any
    layout: Layout


class Address:
    """Stands for a tensor in a TMA descriptor, which reads its address and dtype."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


class Descriptor:
    """A TMA descriptor of the memory at a `Pointer`."""

    def __init__(self, pointer: Any, made: Any, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype
        self.made = made  # the descriptor of the recorded call, without its tensor
        self.last: tuple[int, Any] = (0, None)  # the last address, and the descriptor for it

    def at(self, address: int) -> Any:
        """Return the descriptor for memory at an address; mostly it is the one of last time."""
        last, found = self.last
        if last != address:
            kind = type(self.made)
            found = kind.__new__(kind)
            found.__dict__.update(self.made.__dict__, base=Address(address, self.dtype))
            self.last = address, found
        return found

    def encoded(self, encode: Any, metadata: Any) -> Callable[[int], Any]:
        """Return a function of an address: encode(descriptor at the address, metadata).

        It remembers addresses: weights stay where they are, and most of the other memory of a
        training step is where it was in the step before.
        """
        return functools.lru_cache(MOST_ADDRESSES)(
            lambda address: encode(self.at(address), metadata)
        )


class Step(NamedTuple):
    """A launch, or a computation of torch if `run` is None. Slots stand for memory."""

    made: tuple[tuple[int, Layout], ...]  # slots to allocate before the step
    run: Any  # the launcher of the compiled kernel
    # A launch has grid, function and metadata; a computation function, its tensors, its result.
    head: tuple[Any, ...]
    values: list[Any]  # all arguments; the next two fields say which are replaced
    pointers: tuple[tuple[int, int, int], ...]  # place among the arguments, slot, offset
    described: tuple[tuple[int, int, int, Descriptor], ...]
    freed: tuple[int, ...]  # slots to free after the step


class Steps(NamedTuple):
    """The steps of a tape. Slots are the tensors of the call, other memory, then the buffer."""

    steps: tuple[Step, ...]
    num_slots: int  # without the buffer
    num_bytes: int  # size of the buffer
    order: tuple[int, ...]  # the slot of each result


class Watch(TorchDispatchMode):
    """Sets `only_memory` to False if any operator but allocations, views and `compute` runs."""

    allowed: ClassVar[set[str]] = {
        *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "view"),
        *("_unsafe_view", "reshape", "slice", "select", "unsqueeze", "squeeze", "detach", "alias"),
        *("as_strided", "expand", "unbind", "narrow"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.only_memory = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        self.only_memory &= recorder.computing or name in self.allowed
        return function(*args, **(kwargs or {}))


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _fills(tensor: Tensor) -> bool:
    """Return True if a tensor covers its whole storage."""
    size = tensor.numel() * tensor.element_size()
    return tensor.storage_offset() == 0 and size == tensor.untyped_storage().nbytes()


class Memory:
    """Maps an address to its slot: a tensor of the call, or other memory."""

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        self.num_given = len(tensors)
        self.given: dict[StorageWeakRef, list[tuple[int, int]]] = {}
        for at, one in enumerate(tensors):
            if one is not None and one.numel():
                self.given.setdefault(_storage(one), []).append((at, one.data_ptr()))
        self.layouts = [None if one is None else _layout(one) for one in tensors]
        self.slots: dict[StorageWeakRef, int] = {}  # slot of each other memory
        self.num_bytes: list[int] = []  # size of each other memory
        addresses = [pointer for found in self.given.values() for _, pointer in found]
        # True: an address could belong to several tensors, so that the call cannot be repeated.
        self.lost = len(set(addresses)) < len(addresses)

    def traced(self, value: Any) -> Any:
        """Return a value as a step keeps it: a `Pointer` or `Descriptor` for memory."""
        if isinstance(value, Tensor):
            return self._pointer(value)
        if not hasattr(value, "block_shape"):
            return value
        pointer = self._pointer(value.base)
        self.lost |= not isinstance(pointer, Pointer) or not hasattr(value, "__dict__")
        made = copy.copy(value)
        made.base = None
        return Descriptor(pointer, made, value.base.dtype)

    def operand(self, tensor: Tensor) -> Operand:
        """Return a tensor as a computation keeps it.

        It must be a whole tensor of the call, or cover its whole storage; otherwise set `lost`.
        """
        pointer = self._pointer(tensor)
        found = Operand(pointer, _layout(tensor))
        given = isinstance(pointer, Pointer) and pointer.slot < self.num_given
        whole = self.layouts[pointer.slot] == found.layout if given else _fills(tensor)
        self.lost |= not isinstance(pointer, Pointer) or pointer.offset != 0 or not whole
        return found

    def _pointer(self, tensor: Tensor) -> Any:
        address = tensor.data_ptr()
        if address == 0:  # it has no element
            return 0
        storage = _storage(tensor)
        if storage in self.given:
            near = [Pointer(at, address - begin) for at, begin in self.given[storage]]
            exact = [one for one in near if one.offset == 0]
            self.lost |= not exact and len(near) > 1  # two tensors of the call share memory
            return (exact or near)[0]
        slot = self._slot(storage, tensor)
        return Pointer(slot, address - tensor.untyped_storage().data_ptr())

    def _slot(self, storage: StorageWeakRef, tensor: Tensor) -> int:
        if storage not in self.slots:
            self.slots[storage] = self.num_given + len(self.slots)
            self.num_bytes.append(tensor.untyped_storage().nbytes())
        return self.slots[storage]

    def result_slots(self, results: Results) -> tuple[int, ...]:
        """Return the slot of each result.

        Every result must fill its storage and share it with no other tensor; otherwise set `lost`.
        """
        found = []
        for one in results:
            storage = _storage(one)
            self.lost |= not _fills(one) or storage in self.given
            found.append(self._slot(storage, one))
        self.lost |= len(set(found)) < len({id(one) for one in results})
        return tuple(found)


def steps_of(
    recorded: list[Launch | Computation | None], memory: Memory, results: Results
) -> Steps | None:
    """Return the steps of a tape, or None if an address in them cannot be traced."""
    order = memory.result_slots(results)
    known = [one for one in recorded if one is not None]
    if memory.lost or len(known) < len(recorded) or not known:
        return None
    plan = _Plan(memory, known, {at: _layout(one) for at, one in zip(order, results, strict=True)})
    steps = tuple(plan.step(at, one) for at, one in enumerate(known))
    return Steps(steps, plan.num_slots, plan.num_bytes, order)


def _pointers(step: Launch | Computation) -> list[Pointer]:
    """Return all memory that a step reads or writes."""
    values = (*step.args, step.result) if isinstance(step, Computation) else step.args
    found = [one.pointer if isinstance(one, Operand | Descriptor) else one for one in values]
    return [one for one in found if isinstance(one, Pointer)]


class _Plan:
    """The place and the lifetime of all memory that is no tensor of the call.

    A slot has a place in the buffer, or memory of its own between its first and its last step.
    """

    def __init__(
        self,
        memory: Memory,
        recorded: list[Launch | Computation],
        results: dict[int, Layout],
    ) -> None:
        first, last = {}, {}
        layouts = dict(results)  # layouts of memory that is no part of the buffer
        computed = set()  # memory that torch allocates
        for at, step in enumerate(recorded):
            for slot, _ in _pointers(step):
                first.setdefault(slot, at)
                last[slot] = at
            if isinstance(step, Computation):
                layouts |= {one.pointer.slot: one.layout for one in (*step.args, step.result)}
                computed.add(step.result.pointer.slot)
        self.num_slots = memory.num_given + len(memory.num_bytes)
        self.num_bytes = 0
        self.offsets: dict[int, int] = {}  # in the buffer
        for slot, size in enumerate(memory.num_bytes, memory.num_given):
            if slot not in layouts and size < LARGE_BYTES:
                self.offsets[slot] = self.num_bytes
                self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
            elif slot not in layouts:
                layouts[slot] = ((size,), (1,), torch.uint8)
        own = [slot for slot in layouts if slot >= memory.num_given]
        self.made = [
            (first.get(slot, 0), slot, layouts[slot]) for slot in own if slot not in computed
        ]
        self.freed = [(last[slot], slot) for slot in own if slot not in results]

    def step(self, at: int, recorded: Launch | Computation) -> Step:
        made = tuple((slot, layout) for first, slot, layout in self.made if first == at)
        freed = tuple(slot for last, slot in self.freed if last == at)
        if isinstance(recorded, Computation):
            slots = tuple(one.pointer.slot for one in recorded.args)
            head = recorded.function, slots, recorded.result.pointer.slot
            return Step(made, None, head, [], (), (), freed)
        run, function, metadata, constants, _ = recorded.compiled
        args = recorded.args
        pointers = tuple(
            (place, *self._moved(one)) for place, one in enumerate(args) if isinstance(one, Pointer)
        )
        described = tuple(
            (place, *self._moved(one.pointer), one)
            for place, one in enumerate(args)
            if isinstance(one, Descriptor)
        )
        head = (*recorded.grid, function, metadata)
        return Step(made, run, head, [*args, *constants], pointers, described, freed)

    def _moved(self, pointer: Pointer) -> tuple[int, int]:
        if pointer.slot in self.offsets:
            return self.num_slots, self.offsets[pointer.slot] + pointer.offset
        return pointer
