"""TMA descriptors for blocks of bf16 in swizzled shared memory. This module imports Gluon."""

import functools

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@functools.cache
def swizzled(*block: int) -> gl.NVMMASharedLayout:
    """Return the layout of a block, kept: working it out is more than half of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor for blocks of a tensor, whose address must be aligned (`tma_aligned`)."""
    return TensorDescriptor.from_tensor(tensor, block, swizzled(*block))
