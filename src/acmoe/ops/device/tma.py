"""TMA descriptors for blocks in swizzled shared memory. It imports Gluon."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


@functools.cache
def swizzled(*block: int, dtype: torch.dtype = torch.bfloat16) -> gl.NVMMASharedLayout:
    """Return the layout of a block; cached, since computing it is over half of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENTS[dtype])


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor for blocks of a tensor; its address must be `tma_aligned`."""
    return TensorDescriptor.from_tensor(tensor, block, swizzled(*block, dtype=tensor.dtype))
