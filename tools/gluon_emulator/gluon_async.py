"""Asynchronous operations of an emulated Gluon kernel, which happen as late as they may.

A copy's target is poison until somebody waits for it, and sources are read only then: a buffer
reused too early, or read too soon, gives NaN.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from gluon_barrier import barrier_at
from gluon_memory import Shared, addresses, load, pointer_to
from gluon_program import here, step
from gluon_values import HELD, TORCH, Value, cast, emulates, poison


class TensorMap:
    """A TMA descriptor: a strided tensor in global memory and the block that one copy moves."""

    def __init__(
        self,
        base: Value,
        shape: Any,
        strides: Any,
        block_shape: Any,
        layout: Any,
        padding: str = "zero",
    ) -> None:
        self.base, self.layout, self.padding = base, layout, padding
        self.shape, self.strides = [int(n) for n in shape], [int(n) for n in strides]
        self.block_shape = [int(n) for n in block_shape]
        self.dtype = base.dtype.element_ty
        self.block_type = gl.block_type(self.dtype, self.block_shape)
        self.nbytes_per_cta = self.block_type.nbytes

    def block(self, coord: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets of a block's elements, and which of them lie inside the tensor."""
        ranges = [int(c) + torch.arange(n) for c, n in zip(coord, self.block_shape, strict=True)]
        grids = torch.meshgrid(*ranges, indexing="ij")
        inside = torch.ones(self.block_shape, dtype=torch.bool)
        offsets = self.base.data.expand(self.block_shape)
        for grid, size, stride in zip(grids, self.shape, self.strides, strict=True):
            inside = inside & (grid >= 0) & (grid < size)
            offsets = offsets + grid * stride
        return offsets, inside

    def check(self, shared: Shared) -> None:
        if shared.numel != self.block_type.numel or shared.dtype != self.dtype:
            raise TypeError(
                f"TMA block {self.dtype}{self.block_shape} for {shared.dtype}{shared.shape}"
            )
        address = addresses(self.layout, self.block_shape, TORCH[self.dtype].itemsize)
        if not torch.equal(address.flatten(), (shared.address - shared.address.min()).flatten()):
            raise TypeError(f"TMA block of {self.layout} for shared memory of {shared.layout}")


def tensor_map(host: Any) -> TensorMap:
    """A kernel's view of a host TensorDescriptor."""
    padding = getattr(host, "padding", "zero")
    base = pointer_to(host.base)
    return TensorMap(base, host.shape, host.strides, host.block_shape, host.layout, padding)


@emulates("make_tensor_descriptor")
def make_tensor_descriptor(
    base: Value,
    shape: Any,
    strides: Any,
    block_shape: Any,
    layout: Any,
    padding_option: str = "zero",
) -> TensorMap:
    return TensorMap(base, shape, strides, block_shape, layout, padding_option)


@emulates("tma.async_copy_global_to_shared", "tma.async_load")
def tma_load(
    tensor_desc: TensorMap, coord: Any, barrier: Shared, result: Shared, pred: Any = True
) -> None:
    """Elements outside the tensor arrive as zeros (or NaN) and count as bytes all the same."""
    if not pred:
        return
    tensor_desc.check(result)
    target = barrier_at(barrier)
    offsets, inside = tensor_desc.block(coord)

    def land() -> None:
        empty = float("nan") if tensor_desc.padding == "nan" else 0
        data = torch.full(inside.shape, empty, dtype=tensor_desc.base.base.dtype)
        data[inside] = tensor_desc.base.base[offsets[inside]]
        result.write(data.reshape(result.shape))
        result.marks()[result.address] = False
        target.arrive(0, received=tensor_desc.block_type.nbytes)

    result.spoil()
    target.in_flight.append(land)
    step()


@emulates("tma.async_copy_shared_to_global", "tma.async_store")
def tma_store(tensor_desc: TensorMap, coord: Any, src: Shared) -> None:
    tensor_desc.check(src)
    src.check_fenced()
    offsets, inside = tensor_desc.block(coord)

    def land() -> None:
        tensor_desc.base.base[offsets[inside]] = src.read().reshape(inside.shape)[inside]

    here().stores.append(land)
    step()


def _land_all_but(queue: list[Callable[[], None]], outstanding: int) -> None:
    while len(queue) > outstanding:
        queue.pop(0)()


@emulates("store_wait")
def store_wait(pendings: int, read_only: bool = True) -> None:
    step()
    _land_all_but(here().stores, int(pendings))


@emulates("async_copy.async_copy_global_to_shared", "async_copy.async_load")
def copy_async(smem: Shared, pointer: Value, mask: Any = None, **_hints: Any) -> None:
    """Masked-off elements become zeros."""
    if pointer.shape != smem.shape:
        raise TypeError(f"pointers of shape {pointer.shape} for shared memory of {smem.shape}")

    def land() -> None:
        smem.write(load(pointer, mask, other=0).data)
        smem.marks()[smem.address] = True

    smem.spoil()
    here().copies.append(land)
    step()


@emulates("async_copy.commit_group")
def commit_group() -> None:
    here().groups.append(here().copies)
    here().copies = []


@emulates("async_copy.wait_group")
def wait_group(num_outstanding: int = 0) -> None:
    step()
    while len(here().groups) > num_outstanding:
        _land_all_but(here().groups.pop(0), 0)


@emulates("async_copy.mbarrier_arrive")
def arrive_after_copies(mbarrier: Shared, increment_count: bool = True) -> None:
    """Every thread arrives once its copies landed; increment_count makes the phase expect them."""
    barrier, me = barrier_at(mbarrier), here()
    groups, me.groups, copies, me.copies = me.groups, [], me.copies, []
    if increment_count:
        barrier.missing += me.num_warps * 32

    def land() -> None:
        for group in (*groups, copies):
            _land_all_but(group, 0)
        barrier.arrive(me.num_warps * 32)

    barrier.in_flight.append(land)
    step()


def _operand(x: Any) -> torch.Tensor:
    """A wgmma operand as float32; float32 itself loses the 13 bits that TF32 lacks."""
    data = (x.read() if isinstance(x, Shared) else x.data).to(torch.float32)
    if x.dtype == gl.float32:
        data = (data.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return data


def _check_product(a: Any, b: Any, acc: Value) -> None:
    (m, k), (k_b, n) = a.shape, b.shape
    bytes_k = k * TORCH[a.dtype].itemsize
    if k != k_b or acc.shape != [m, n] or a.dtype != b.dtype or not isinstance(b, Shared):
        raise TypeError(f"wgmma of {a.dtype}{a.shape} and {b.dtype}{b.shape} into {acc.shape}")
    if m % 64 or n % 8 or bytes_k % 32:
        raise ValueError(f"wgmma needs M of 64s, N of 8s, K of 32 bytes, not {m}, {n}, {bytes_k}")
    if (
        isinstance(a, Value)
        and a.layout
        and acc.layout
        and getattr(a.layout, "parent", None) != acc.layout
    ):
        raise ValueError(f"wgmma's register operand needs a dot operand layout of {acc.layout}")
    for operand in (a, b):
        if isinstance(operand, Shared):
            operand.check_fenced()


@emulates("warpgroup_mma")
def warpgroup_mma(
    a: Any, b: Shared, acc: Value, *, use_acc: Any = True, is_async: bool = False, **_precision: Any
) -> Value:
    """The product is taken, and its operands are read, only when it is waited for."""
    _check_product(a, b, acc)
    result = Value(poison(acc.shape, acc.dtype), acc.dtype, acc.layout)
    keep = bool(use_acc)

    def land() -> None:
        product = _operand(a) @ _operand(b)
        result.data = (product + acc.data if keep else product).to(HELD[acc.dtype])

    here().products.append(land)
    step()
    if not is_async:
        _land_all_but(here().products, 0)
    return result


@emulates("warpgroup_mma_wait")
def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise ValueError("warpgroup_mma_wait needs deps")
    step()
    _land_all_but(here().products, int(num_outstanding))
    return deps[0] if len(deps) == 1 else tuple(deps)


@emulates("warpgroup_mma_init")
def warpgroup_mma_init(value: Value) -> Value:
    return value


@emulates("mma_v2", "dot_fma")
def dot(a: Value, b: Value, acc: Value, input_precision: Any = None) -> Value:
    return cast(acc.with_data(_operand(a) @ _operand(b) + acc.data), acc.dtype)
