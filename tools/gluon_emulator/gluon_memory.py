"""Memory of an emulated Gluon kernel: global pointers, and shared memory with the GPU's addresses.

Shared memory starts as poison (NaN). Bytes written by ordinary stores (the generic proxy) are
marked as unfenced until `fence_async_shared`; TMA and wgmma (the async proxy) raise if they read
such bytes.
"""

import math
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from gluon_program import current_partition, yield_point
from gluon_values import (
    POISON,
    REGISTER_DTYPE,
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
    """Return a pointer to a tensor's first element, valid for all of its storage."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (size,))
    return Value(
        torch.tensor(tensor.storage_offset()), gl.pointer_type(TRITON[tensor.dtype]), None, flat
    )


def _checked_access(
    pointer: Value, mask: Any, *others: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return layout, offsets and mask of an access; raise if an active lane is out of bounds."""
    mask = as_value(True if mask is None else mask)
    layout = common_layout(pointer, mask, *map(as_value, others))
    offsets, active = torch.broadcast_tensors(pointer.data, mask.data.bool())
    if ((offsets < 0) | (offsets >= pointer.base.numel()))[active].any():
        raise IndexError(f"access outside a tensor of {pointer.base.numel()} elements")
    return layout, offsets, active


@emulates("load")
def load(pointer: Value, mask: Any = None, other: Any = None, **_hints: Any) -> Value:
    """Load; masked-off lanes without `other` are poison, since the GPU leaves them undefined."""
    dtype = pointer.dtype.element_ty
    layout, offsets, active = _checked_access(pointer, mask, *([] if other is None else [other]))
    data = poison((), dtype) if other is None else cast(other, dtype).data
    data = data.expand(offsets.shape).clone()
    data[active] = pointer.base[offsets[active]].to(REGISTER_DTYPE[dtype])
    return Value(data, dtype, layout)


@emulates("store")
def store(pointer: Value, value: Any, mask: Any = None, **_hints: Any) -> None:
    _, offsets, active = _checked_access(pointer, mask, value)
    data = cast(value, pointer.dtype.element_ty).data.to(pointer.base.dtype)
    pointer.base[offsets[active]] = data.expand(offsets.shape)[active]
    yield_point()


@emulates("atomic_add")
def atomic_add(pointer: Value, value: Any, mask: Any = None, **_order: Any) -> Value:
    yield_point()
    layout, offsets, active = _checked_access(pointer, mask, value)
    dtype = pointer.dtype.element_ty
    data = cast(value, dtype).data.expand(offsets.shape)
    old = poison((), dtype).expand(offsets.shape).clone()
    for index in active.nonzero().tolist():
        at, lane = offsets[tuple(index)], tuple(index)
        old[lane] = pointer.base[at]
        pointer.base[at] += data[lane]
    return Value(old, dtype, layout)


def _nvmma_offsets(layout: Any, coords: list[torch.Tensor], itemsize: int) -> torch.Tensor:
    """Return offsets of NVMMASharedLayout.

    Columns are tiled by the swizzle width, in which 16-byte chunks are xored with the row.
    """
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
    """Return offsets of SwizzledSharedLayout."""
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
    """Return offsets of a linear layout: bit i of an offset stands for offset_bases[i]."""
    offset = torch.arange(math.prod(shape))
    coords = [torch.zeros_like(offset) for _ in shape]
    for bit, basis in enumerate(layout.offset_bases):
        coords = [c ^ (offset >> bit & 1) * b for c, b in zip(coords, basis, strict=True)]
    result = torch.empty(tuple(shape), dtype=torch.int64)
    result[tuple(coords)] = offset
    return result


def addresses(layout: Any, shape: list[int], itemsize: int) -> torch.Tensor:
    """Return each element's address, in elements; dimensions before the layout's are stages."""
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


class Allocation:
    """One allocation of shared memory: bytes, marks of unfenced bytes, and mbarriers by address."""

    def __init__(self, size: int) -> None:
        size += -size % 16  # a multiple of every element size
        self.bytes = torch.full((size,), POISON, dtype=torch.uint8)
        self.unfenced = torch.zeros(size, dtype=torch.bool)
        self.barriers: dict[int, Any] = {}
        current_partition().program.allocations.append(self)

    def check_done(self) -> None:
        """Raise if a barrier has copies in flight."""
        for barrier in self.barriers.values():
            barrier.check_done()


class Shared:
    """A shared-memory descriptor: a view of an allocation, with the address of each element."""

    def __init__(
        self, allocation: Allocation, dtype: Any, address: torch.Tensor, layout: Any
    ) -> None:
        self.allocation, self.dtype, self.address, self.layout = allocation, dtype, address, layout

    shape = property(lambda self: list(self.address.shape))
    rank = property(lambda self: self.address.ndim)
    numel = property(lambda self: self.address.numel())
    nbytes_per_cta = property(lambda self: self.address.numel() * TORCH[self.dtype].itemsize)
    type = property(lambda self: self)
    element_ty = property(lambda self: self.dtype)

    def _view(self, address: torch.Tensor, layout: Any = None) -> "Shared":
        return Shared(self.allocation, self.dtype, address, layout)

    def read(self) -> torch.Tensor:
        return self.allocation.bytes.view(TORCH[self.dtype])[self.address]

    def write(self, data: torch.Tensor) -> None:
        self.allocation.bytes.view(TORCH[self.dtype])[self.address] = data.to(TORCH[self.dtype])

    def unfenced_rows(self) -> torch.Tensor:
        """Return the marks of unfenced bytes of the allocation, one row for each element."""
        return self.allocation.unfenced.view(-1, TORCH[self.dtype].itemsize)

    def check_fenced(self) -> None:
        """Raise if an ordinary store wrote here since the last fence."""
        if self.unfenced_rows()[self.address].any():
            raise RuntimeError(
                "TMA or wgmma reads shared memory that a store wrote: fence_async_shared is missing"
            )

    def poison_contents(self) -> None:
        """Poison the contents: an asynchronous copy that is not complete yet will write here."""
        self.allocation.bytes.view(-1, TORCH[self.dtype].itemsize)[self.address] = POISON

    def load(self, layout: Any = None) -> Value:
        yield_point()
        return Value(self.read().to(REGISTER_DTYPE[self.dtype]), self.dtype, layout)

    def store(self, value: Value) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(
                f"{value.dtype}{value.shape} stored into shared {self.dtype}{self.shape}"
            )
        self.write(value.data)
        self.unfenced_rows()[self.address] = True
        yield_point()

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
        """Return a view of the bytes from the first address on, with another dtype and layout."""
        dtype, layout = dtype or self.dtype, layout or self.layout
        gaps = int(self.address.max() - self.address.min()) + 1 - self.numel
        if gaps and not hasattr(self.layout, "interval_padding_pairs"):
            raise ValueError(f"reinterpret of a slice with gaps: {self.layout}{self.shape}")
        size, new_size = TORCH[self.dtype].itemsize, TORCH[dtype].itemsize
        address = addresses(layout, list(self.shape if shape is None else shape), new_size)
        # The view may reach beyond the allocation; only an access there raises.
        address = address + int(self.address.min()) * size // new_size
        return Shared(self.allocation, dtype, address, layout)

    _reinterpret = reinterpret

    def _keep_alive(self) -> None:
        """Do nothing: no allocation is freed before the program ends."""


@emulates("allocate_shared_memory")
def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Shared:
    size = TORCH[element_ty].itemsize
    address = addresses(layout, [int(n) for n in shape], size)
    shared = Shared(Allocation((int(address.max()) + 1) * size), element_ty, address, layout)
    if value is not None:
        shared.store(value)
    return shared


@emulates("fence_async_shared")
def fence_async_shared(cluster: bool = False) -> None:
    """Clear all marks: a fence in one partition counts for all, so a misplaced one is not seen."""
    for allocation in current_partition().program.allocations:
        allocation.unfenced[:] = False
