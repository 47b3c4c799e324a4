"""Asynchronous operations of an emulated Gluon kernel: TMA, cp.async and wgmma.

Each is queued and completes as late as the hardware may complete it: when it is waited for. Its
source is read only then, and its target is poison (NaN) until then, so that a buffer which is
reused too early or read too soon gives wrong results.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from gluon_barrier import barrier_at
from gluon_memory import Shared, addresses, load, pointer_to
from gluon_program import current_partition, yield_point
from gluon_values import REGISTER_DTYPE, TORCH, Value, cast, emulates, poison


class Descriptor:
    """A TMA descriptor: a strided tensor in global memory, and the shape of a copied block."""

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
        """Return the offsets of a block's elements, and the mask of those inside the tensor."""
        ranges = [int(c) + torch.arange(n) for c, n in zip(coord, self.block_shape, strict=True)]
        grids = torch.meshgrid(*ranges, indexing="ij")
        inside = torch.ones(self.block_shape, dtype=torch.bool)
        offsets = self.base.data.expand(self.block_shape)
        for grid, size, stride in zip(grids, self.shape, self.strides, strict=True):
            inside = inside & (grid >= 0) & (grid < size)
            offsets = offsets + grid * stride
        return offsets, inside

    def check(self, shared: Shared) -> None:
        """Raise if shape, dtype or layout of shared memory do not match the descriptor's block."""
        if shared.numel != self.block_type.numel or shared.dtype != self.dtype:
            raise TypeError(
                f"TMA block {self.dtype}{self.block_shape} for {shared.dtype}{shared.shape}"
            )
        address = addresses(self.layout, self.block_shape, TORCH[self.dtype].itemsize)
        if not torch.equal(address.flatten(), (shared.address - shared.address.min()).flatten()):
            raise TypeError(f"TMA block of {self.layout} for shared memory of {shared.layout}")


def descriptor(host: Any) -> Descriptor:
    """Convert a TensorDescriptor of the host to the one that a kernel sees."""
    padding = getattr(host, "padding", "zero")
    base = pointer_to(host.base)
    return Descriptor(base, host.shape, host.strides, host.block_shape, host.layout, padding)


@emulates("make_tensor_descriptor")
def make_tensor_descriptor(
    base: Value,
    shape: Any,
    strides: Any,
    block_shape: Any,
    layout: Any,
    padding_option: str = "zero",
) -> Descriptor:
    return Descriptor(base, shape, strides, block_shape, layout, padding_option)


@emulates("tma.async_copy_global_to_shared", "tma.async_load")
def tma_load(
    tensor_desc: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: Any = True
) -> None:
    """Queue a TMA load; elements outside the tensor are zeros (or NaN) and count as bytes too."""
    if not pred:
        return
    tensor_desc.check(result)
    target = barrier_at(barrier)
    offsets, inside = tensor_desc.block(coord)

    def complete() -> None:
        empty = float("nan") if tensor_desc.padding == "nan" else 0
        data = torch.full(inside.shape, empty, dtype=tensor_desc.base.base.dtype)
        data[inside] = tensor_desc.base.base[offsets[inside]]
        result.write(data.reshape(result.shape))
        result.unfenced_rows()[result.address] = False
        target.arrive(0, received=tensor_desc.block_type.nbytes)

    result.poison_contents()
    target.in_flight.append(complete)
    yield_point()


@emulates("tma.async_copy_shared_to_global", "tma.async_store")
def tma_store(tensor_desc: Descriptor, coord: Any, src: Shared) -> None:
    """Queue a TMA store; the source is read when `store_wait` completes it."""
    tensor_desc.check(src)
    src.check_fenced()
    offsets, inside = tensor_desc.block(coord)

    def complete() -> None:
        tensor_desc.base.base[offsets[inside]] = src.read().reshape(inside.shape)[inside]

    current_partition().stores.append(complete)
    yield_point()


def _complete_all_but(queue: list[Callable[[], None]], outstanding: int) -> None:
    """Complete the oldest operations of a queue until `outstanding` are left."""
    while len(queue) > outstanding:
        queue.pop(0)()


@emulates("store_wait")
def store_wait(pendings: int, read_only: bool = True) -> None:
    yield_point()
    _complete_all_but(current_partition().stores, int(pendings))


@emulates("async_copy.async_copy_global_to_shared", "async_copy.async_load")
def cp_async(smem: Shared, pointer: Value, mask: Any = None, **_hints: Any) -> None:
    """Queue cp.async copies; masked-off elements become zeros."""
    if pointer.shape != smem.shape:
        raise TypeError(f"pointers of shape {pointer.shape} for shared memory of {smem.shape}")

    def complete() -> None:
        smem.write(load(pointer, mask, other=0).data)
        smem.unfenced_rows()[smem.address] = True

    smem.poison_contents()
    current_partition().copies.append(complete)
    yield_point()


@emulates("async_copy.commit_group")
def commit_group() -> None:
    current_partition().groups.append(current_partition().copies)
    current_partition().copies = []


@emulates("async_copy.wait_group")
def wait_group(num_outstanding: int = 0) -> None:
    yield_point()
    while len(current_partition().groups) > num_outstanding:
        _complete_all_but(current_partition().groups.pop(0), 0)


@emulates("async_copy.mbarrier_arrive")
def arrive_after_copies(mbarrier: Shared, increment_count: bool = True) -> None:
    """Let every thread arrive when its copies are complete.

    increment_count adds these arrivals to those that the phase expects.
    """
    barrier, me = barrier_at(mbarrier), current_partition()
    groups, me.groups, copies, me.copies = me.groups, [], me.copies, []
    if increment_count:
        barrier.missing += me.num_warps * 32

    def complete() -> None:
        for group in (*groups, copies):
            _complete_all_but(group, 0)
        barrier.arrive(me.num_warps * 32)

    barrier.in_flight.append(complete)
    yield_point()


def _operand(x: Any) -> torch.Tensor:
    """Return a wgmma operand as float32; a float32 operand loses the 13 bits that TF32 lacks."""
    data = (x.read() if isinstance(x, Shared) else x.data).to(torch.float32)
    if x.dtype == gl.float32:
        data = (data.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return data


def _check_wgmma(a: Any, b: Any, acc: Value) -> None:
    """Raise if wgmma does not support the operands, or if they are not fenced."""
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
    """Queue a wgmma; its operands are read, and its result computed, only when it is waited for."""
    _check_wgmma(a, b, acc)
    result = Value(poison(acc.shape, acc.dtype), acc.dtype, acc.layout)
    accumulate = bool(use_acc)

    def complete() -> None:
        product = _operand(a) @ _operand(b)
        result.data = (product + acc.data if accumulate else product).to(REGISTER_DTYPE[acc.dtype])

    current_partition().mmas.append(complete)
    yield_point()
    if not is_async:
        _complete_all_but(current_partition().mmas, 0)
    return result


@emulates("warpgroup_mma_wait")
def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise ValueError("warpgroup_mma_wait needs deps")
    yield_point()
    _complete_all_but(current_partition().mmas, int(num_outstanding))
    return deps[0] if len(deps) == 1 else tuple(deps)


@emulates("warpgroup_mma_init")
def warpgroup_mma_init(value: Value) -> Value:
    return value


@emulates("mma_v2", "dot_fma")
def dot(a: Value, b: Value, acc: Value, input_precision: Any = None) -> Value:
    return cast(acc.with_data(_operand(a) @ _operand(b) + acc.data), acc.dtype)
