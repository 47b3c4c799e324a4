"""Memory of an emulated Gluon kernel: pointers, shared memory at its true addresses.

Shared memory starts as poison and keeps a mark on bytes written by ordinary stores until
`fence_async_shared`: TMA and wgmma must not read marked bytes.
"""

import math
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from gluon_program import here, step
from gluon_values import (
    HELD,
    POISON,
    TORCH,
    TRITON,
    Value,
    as_value,
    cast,
    common_layout,
    emulates,
    poison,
)


def pointer_to(tensor: torch.Tensor) -> Value:
    """The address of a torch tensor's first element, good for all of its storage."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (size,))
    return Value(
        torch.tensor(tensor.storage_offset()), gl.pointer_type(TRITON[tensor.dtype]), None, flat
    )


def _active(pointer: Value, mask: Any, *others: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Layout, offsets and mask of an access; the addresses of its true lanes are checked."""
    mask = as_value(True if mask is None else mask)
    layout = common_layout(pointer, mask, *map(as_value, others))
    offsets, keep = torch.broadcast_tensors(pointer.data, mask.data.bool())
    if ((offsets < 0) | (offsets >= pointer.base.numel()))[keep].any():
        raise IndexError(f"access outside a tensor of {pointer.base.numel()} elements")
    return layout, offsets, keep


@emulates("load")
def load(pointer: Value, mask: Any = None, other: Any = None, **_hints: Any) -> Value:
    """Lanes that are masked off without `other` are poison: the card promises nothing."""
    dtype = pointer.dtype.element_ty
    layout, offsets, keep = _active(pointer, mask, *([] if other is None else [other]))
    data = poison((), dtype) if other is None else cast(other, dtype).data
    data = data.expand(offsets.shape).clone()
    data[keep] = pointer.base[offsets[keep]].to(HELD[dtype])
    return Value(data, dtype, layout)


@emulates("store")
def store(pointer: Value, value: Any, mask: Any = None, **_hints: Any) -> None:
    _, offsets, keep = _active(pointer, mask, value)
    data = cast(value, pointer.dtype.element_ty).data.to(pointer.base.dtype)
    pointer.base[offsets[keep]] = data.expand(offsets.shape)[keep]
    step()


@emulates("atomic_add")
def atomic_add(pointer: Value, value: Any, mask: Any = None, **_order: Any) -> Value:
    step()
    layout, offsets, keep = _active(pointer, mask, value)
    dtype = pointer.dtype.element_ty
    data = cast(value, dtype).data.expand(offsets.shape)
    old = poison((), dtype).expand(offsets.shape).clone()
    for index in keep.nonzero().tolist():
        at, place = offsets[tuple(index)], tuple(index)
        old[place] = pointer.base[at]
        pointer.base[at] += data[place]
    return Value(old, dtype, layout)


def _nvmma_offsets(layout: Any, coords: list[torch.Tensor], itemsize: int) -> torch.Tensor:
    """Columns of one swizzle width after another; in it 16-byte chunks are xored with the row."""
    if layout.fp4_padded:
        raise NotImplementedError("fp4 padding is not emulated")
    coords = coords[1:] + coords[:1] if layout.transposed else coords
    sizes = [int(coord.max()) + 1 for coord in coords]
    row = torch.zeros_like(coords[0])
    for coord, size in zip(coords[:-1], sizes[:-1], strict=True):
        row = row * size + coord
    swizzle = layout.swizzle_byte_width
    width = swizzle or min(sizes[-1], 256) * itemsize  # a TMA box has at most 256 columns
    byte = coords[-1] * itemsize
    column, chunk = byte // width, byte % width // 16
    phase = row * width // 128 % (width // 16) if swizzle else 0
    inner = row * width + (chunk ^ phase) * 16 + byte % 16
    return (column * math.prod(sizes[:-1]) * width + inner) // itemsize


def _swizzled_offsets(layout: Any, coords: list[torch.Tensor]) -> torch.Tensor:
    sizes = [int(coord.max()) + 1 for coord in coords]
    if layout.max_phase > 1:
        fast, slow = layout.order[:2]
        phase = coords[slow] // layout.per_phase % layout.max_phase
        chunk, rest = coords[fast] // layout.vec, coords[fast] % layout.vec
        coords = [*coords]
        coords[fast] = (chunk ^ phase) * layout.vec + rest
    flat = torch.zeros_like(coords[0])
    for dim in reversed(layout.order):
        flat = flat * sizes[dim] + coords[dim]
    return flat


def _linear_offsets(layout: Any, shape: list[int]) -> torch.Tensor:
    """Offset bit i stands for the coordinates offset_bases[i]."""
    offset = torch.arange(math.prod(shape))
    coords = [torch.zeros_like(offset) for _ in shape]
    for bit, basis in enumerate(layout.offset_bases):
        coords = [c ^ (offset >> bit & 1) * b for c, b in zip(coords, basis, strict=True)]
    result = torch.empty(tuple(shape), dtype=torch.int64)
    result[tuple(coords)] = offset
    return result


def addresses(layout: Any, shape: list[int], itemsize: int) -> torch.Tensor:
    """Address of each element, in elements; dimensions the layout does not know are stages."""
    kind = type(layout).__name__
    bases = getattr(layout, "offset_bases", None)
    rank = (
        len(bases[0])
        if bases
        else layout.rank
        if kind == "NVMMASharedLayout"
        else len(layout.order)
    )
    stages, block = shape[: len(shape) - rank], shape[len(shape) - rank :]
    if bases:
        inner = _linear_offsets(layout, block)
    else:
        coords = [*torch.meshgrid(*map(torch.arange, block), indexing="ij")]
        nvmma = kind == "NVMMASharedLayout"
        inner = (
            _nvmma_offsets(layout, coords, itemsize) if nvmma else _swizzled_offsets(layout, coords)
        )
    stage = torch.arange(math.prod(stages)).reshape(*stages, *[1] * rank)
    flat = stage * math.prod(block) + inner
    pairs = getattr(layout, "interval_padding_pairs", [])
    return flat + sum(flat // interval * padding for interval, padding in pairs)


class Memory:
    """One allocation: bytes, the unfenced writes, and the barriers by address."""

    def __init__(self, size: int) -> None:
        size += -size % 16  # any element type divides it
        self.bytes = torch.full((size,), POISON, dtype=torch.uint8)
        self.unfenced = torch.zeros(size, dtype=torch.bool)
        self.barriers: dict[int, Any] = {}
        here().program.memories.append(self)

    def finish(self) -> None:
        for barrier in self.barriers.values():
            barrier.finish()


class Shared:
    """A shared memory descriptor: a view of an allocation, with each element's address."""

    def __init__(self, memory: Memory, dtype: Any, address: torch.Tensor, layout: Any) -> None:
        self.memory, self.dtype, self.address, self.layout = memory, dtype, address, layout

    shape = property(lambda self: list(self.address.shape))
    rank = property(lambda self: self.address.ndim)
    numel = property(lambda self: self.address.numel())
    nbytes_per_cta = property(lambda self: self.address.numel() * TORCH[self.dtype].itemsize)
    type = property(lambda self: self)
    element_ty = property(lambda self: self.dtype)

    def _view(self, address: torch.Tensor, layout: Any = None) -> "Shared":
        return Shared(self.memory, self.dtype, address, layout)

    def read(self) -> torch.Tensor:
        return self.memory.bytes.view(TORCH[self.dtype])[self.address]

    def write(self, data: torch.Tensor) -> None:
        self.memory.bytes.view(TORCH[self.dtype])[self.address] = data.to(TORCH[self.dtype])

    def marks(self) -> torch.Tensor:
        """The unfenced marks of the allocation, a row of bytes each element."""
        return self.memory.unfenced.view(-1, TORCH[self.dtype].itemsize)

    def check_fenced(self) -> None:
        if self.marks()[self.address].any():
            raise RuntimeError(
                "TMA or wgmma reads shared memory that a store wrote: fence_async_shared is missing"
            )

    def spoil(self) -> None:
        """An asynchronous copy is about to write here: until it lands nothing is known."""
        self.memory.bytes.view(-1, TORCH[self.dtype].itemsize)[self.address] = POISON

    def load(self, layout: Any = None) -> Value:
        step()
        return Value(self.read().to(HELD[self.dtype]), self.dtype, layout)

    def store(self, value: Value) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(
                f"{value.dtype}{value.shape} stored into shared {self.dtype}{self.shape}"
            )
        self.write(value.data)
        self.marks()[self.address] = True
        step()

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return self._view(self.address.narrow(dim, int(start), int(length)), self.layout)

    def index(self, index: Any) -> "Shared":
        if not 0 <= int(index) < self.shape[0]:
            raise IndexError(f"index {int(index)} of shared memory with {self.shape[0]} stages")
        return self._view(self.address[int(index)], self.layout)

    def permute(self, order: Any) -> "Shared":
        return self._view(self.address.permute(tuple(order)))

    def reshape(self, shape: Any) -> "Shared":
        return self._view(self.address.reshape(tuple(shape)))

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> "Shared":
        """The same bytes from this view's first address on, under another type and layout."""
        dtype, layout = dtype or self.dtype, layout or self.layout
        gaps = int(self.address.max() - self.address.min()) + 1 - self.numel
        if gaps and not hasattr(self.layout, "interval_padding_pairs"):
            raise ValueError(f"reinterpret of a slice with gaps: {self.layout}{self.shape}")
        size, new_size = TORCH[self.dtype].itemsize, TORCH[dtype].itemsize
        address = addresses(layout, list(self.shape if shape is None else shape), new_size)
        # It may reach beyond the allocation, if nobody reads or writes there: indexing asks.
        address = address + int(self.address.min()) * size // new_size
        return Shared(self.memory, dtype, address, layout)

    _reinterpret = reinterpret

    def _keep_alive(self) -> None:
        """Nothing is freed before the program ends."""


@emulates("allocate_shared_memory")
def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Shared:
    size = TORCH[element_ty].itemsize
    address = addresses(layout, [int(n) for n in shape], size)
    shared = Shared(Memory((int(address.max()) + 1) * size), element_ty, address, layout)
    if value is not None:
        shared.store(value)
    return shared


@emulates("fence_async_shared")
def fence_async_shared(cluster: bool = False) -> None:
    """Seen as one for all partitions: a fence in the wrong one goes unnoticed."""
    for memory in here().program.memories:
        memory.unfenced[:] = False
