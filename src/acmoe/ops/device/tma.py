"""TMA descriptors for blocks of 16-bit numbers in swizzled shared memory. It imports Gluon."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@functools.cache
def swizzled(*block: int, dtype: torch.dtype = torch.bfloat16) -> gl.NVMMASharedLayout:
    """Return the layout of a block; cached, since computing it is over half of a descriptor."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor for blocks of a bf16 tensor; its address must be `tma_aligned`."""
    return TensorDescriptor.from_tensor(tensor, block, swizzled(*block))
