"""TMA descriptors for blocks of bf16 in swizzled shared memory. This module imports Gluon."""

import functools

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@functools.cache
def swizzled(*block: int) -> gl.NVMMASharedLayout:
    """Return the layout of a block; cached, since computing it is over half of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor for blocks of a tensor; its address must be `tma_aligned`."""
    return TensorDescriptor.from_tensor(tensor, block, swizzled(*block))
