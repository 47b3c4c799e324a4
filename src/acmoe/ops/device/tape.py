"""Repeat the launches of a call with other tensors, for calls so small that the host is slower.

`taped(run, tensors, settings)` returns run(*tensors, *settings). The first call of a kind records
what `run` allocates and launches; later calls of the same kind repeat that: they allocate the
results and one buffer for everything else, and hand addresses to the compiled kernels. So block
sizes, grids and flags are worked out once for each kind of call.

Calls are of one kind if `run`, the settings, the current device, and the shape, dtype and device of
every tensor are equal. A tape is kept only if `run` did nothing but allocate, take views and launch
kernels by `launch`; a dispatch mode and a hook of Triton check this while it is recorded. Tensors
that are not contiguous, or not aligned to 16 bytes, which kernels are compiled for, are left to
`run`.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from acmoe.ops.device.launcher import (
    Compiled,
    Launch,
    count_launches,
    plain_launches,
    recorder,
)

MOST_TAPES = 1024
MOST_BYTES = 2**26  # of a call's buffer; a larger one would hold memory that `run` frees earlier
_ALIGNMENT = 256

Results = tuple[Tensor, ...]


class Pointer(NamedTuple):
    """An address: `offset` bytes after the begin of tensor number `slot`."""

    slot: int
    offset: int


class Address:
    """What a TMA descriptor reads of its tensor."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


class Descriptor(NamedTuple):
    """A TMA descriptor of the memory at a `Pointer`."""

    pointer: Pointer
    made: Any  # the descriptor of the recorded call, without its tensor
    dtype: torch.dtype

    def at(self, pointer: int) -> Any:
        kind = type(self.made)
        found = kind.__new__(kind)
        found.__dict__.update(self.made.__dict__, base=Address(pointer, self.dtype))
        return found


class Tape(NamedTuple):
    """The recorded launches. Slots are the tensors of the call, its results, then the buffer."""

    # of each launch: kernel, grid, arguments with a `Pointer` for each address, and which of them
    # are TMA descriptors
    steps: tuple[
        tuple[Compiled, tuple[int, int, int], tuple[tuple[Any, ...], tuple[int, ...]]], ...
    ]
    # what to allocate: shape, strides and dtype
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    order: tuple[int, ...]  # the allocated tensor that is each result
    num_bytes: int  # of the buffer

    def play(self, slots: list[int], device: torch.device) -> Results:
        """Return the results of the recorded call for tensors at the addresses `slots`."""
        empty = allocator(device)
        made = [empty(*each) for each in self.results]
        slots += [one.data_ptr() for one in made]
        if self.num_bytes:
            buffer = empty((self.num_bytes,), (1,), torch.uint8)
            slots.append(buffer.data_ptr())
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        for (run, function, metadata, constants, _), (x, y, z), args in self.steps:
            values = [
                one if type(one) is not Pointer else slots[one[0]] + one[1] for one in args[0]
            ]
            for at in args[1]:
                slot, offset = values[at].pointer
                values[at] = values[at].at(slots[slot] + offset)
            run(x, y, z, stream, function, metadata, None, None, None, *values, *constants)
        return tuple([made[at] for at in self.order])


class Same:
    """A setting that is equal to itself alone, for objects without a hash."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


@functools.cache
def _compiled_allocator(kind: str) -> Allocator | None:
    """Return the function by which torch's compiled code allocates; None: it has none for this.

    It takes 1 us where `torch.empty` takes 4 (two ARM cores), and allocates on the current device.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: Allocator | None = getattr(guards, f"_empty_strided_{kind}", None)
    return found


def allocator(device: torch.device) -> Allocator:
    """Return a function (shape, strides, dtype) -> uninitialised tensor on this device."""
    kind = device.type
    if kind == "cpu" or (kind == "cuda" and device.index == torch.cuda.current_device()):
        found = _compiled_allocator(kind)
        if found is not None:
            return found
    return functools.partial(_empty, device)


def _empty(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


_tapes: dict[tuple[Any, ...], Tape | None] = {}  # None: this kind of call cannot be repeated
_UNKNOWN: Any = object()


def forget() -> None:
    """Drop all tapes, so that block sizes are chosen anew."""
    _tapes.clear()


def taped(
    run: Callable[..., Results], tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]
) -> Results:
    """Return run(*tensors, *settings), by a tape where there is one.

    No gradient may be recorded, and settings must hold all else that the launches depend on.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    kinds = [None if one is None else (one.shape, one.dtype, one.get_device()) for one in tensors]
    current = torch.cuda.current_device() if first.is_cuda else -1
    key = (run, current, settings, *kinds)
    tape = _tapes.get(key, _UNKNOWN)
    addresses = [0 if one is None else one.data_ptr() for one in tensors]
    together = 0
    for address in addresses:
        together |= address
    fit = together & 15 == 0 and plain_launches()
    fit = fit and all([one is None or one.is_contiguous() for one in tensors])
    if tape is None or not fit or recorder.launches is not None:
        return run(*tensors, *settings)
    if tape is _UNKNOWN:
        return _record(key, run, tensors, settings)
    return tape.play(addresses, device)


class _Watch(TorchDispatchMode):
    """Notes if anything but allocations and views is computed."""

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
        self.only_memory &= name in self.allowed
        return function(*args, **(kwargs or {}))


def _record(
    key: tuple[Any, ...],
    run: Callable[..., Results],
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
) -> Results:
    launches: list[Launch | None] = []
    recorder.launches = launches
    try:
        with _Watch() as watch, count_launches() as seen:
            results = run(*tensors, *settings)
    finally:
        recorder.launches = None
    # A kernel that was not launched by `launch` would be missing from the tape.
    complete = watch.only_memory and seen is not None and len(seen) == len(launches)
    if len(_tapes) >= MOST_TAPES:
        _tapes.clear()
    _tapes[key] = _tape(launches, tensors, results) if complete else None
    return results


def _tape(
    launches: list[Launch | None], tensors: tuple[Tensor | None, ...], results: Results
) -> Tape | None:
    """Return the tape of these launches, or None if an address in them cannot be traced."""
    memory = _Memory(tensors, results)
    steps = []
    for one in launches:
        if one is None:
            return None
        args = tuple(memory.traced(value) for value in one.args)
        described = tuple(at for at, value in enumerate(args) if isinstance(value, Descriptor))
        steps.append((one.compiled, one.grid, (args, described)))
    if memory.lost or memory.num_bytes > MOST_BYTES:
        return None
    shapes = tuple((tuple(one.shape), one.stride(), one.dtype) for one in memory.made)
    order = tuple(next(at for at, made in enumerate(memory.made) if made is one) for one in results)
    return Tape(tuple(steps), shapes, order, memory.num_bytes)


class _Memory:
    """Says of each address in which tensor of the call, which result, or where else it lies."""

    def __init__(self, tensors: tuple[Tensor | None, ...], results: Results) -> None:
        self.made = list({id(one): one for one in results}.values())
        self.known = [*tensors, *self.made]
        self.scratch: dict[int, int] = {}  # where each other allocation begins in the buffer
        self.num_bytes = 0
        # A result must be all of its own memory, and no two tensors of the call the same.
        given = [one.data_ptr() for one in tensors if one is not None and one.numel()]
        begins = {one.untyped_storage().data_ptr() for one in tensors if one is not None}
        self.lost = len(set(given)) < len(given) or any(
            one.numel() * one.element_size() != one.untyped_storage().nbytes()
            or (one.numel() > 0 and one.untyped_storage().data_ptr() in begins)
            for one in self.made
        )

    def traced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._pointer(value)
        if not hasattr(value, "block_shape"):
            return value
        pointer = self._pointer(value.base)
        self.lost |= not isinstance(pointer, Pointer) or not hasattr(value, "__dict__")
        made = copy.copy(value)
        made.base = None
        return Descriptor(pointer, made, value.base.dtype)

    def _pointer(self, tensor: Tensor) -> Any:
        if tensor.data_ptr() == 0:  # it has no element
            return 0
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        near = [
            (at, tensor.data_ptr() - one.data_ptr())
            for at, one in enumerate(self.known)
            if one is not None and one.untyped_storage().data_ptr() == begin
        ]
        exact = [Pointer(at, 0) for at, offset in near if offset == 0]
        if exact:
            return exact[0]
        if near:
            self.lost |= len(near) > 1  # two tensors of the call share memory
            return Pointer(*near[0])
        if begin not in self.scratch:
            self.scratch[begin] = self.num_bytes
            self.num_bytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return Pointer(len(self.known), self.scratch[begin] + tensor.data_ptr() - begin)
