"""Decide whether Triton kernels can run: on a device, in a dtype, with the packages installed.

Nothing here imports Triton. Ops call these functions to choose a kernel before they load one.
`device/hopper.py` decides it for the Hopper kernels, which also depend on the version of Triton.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from acmoe.ops.dispatch import requested
from acmoe.ops.environment import INTERPRET, STORED

# Looked up once, at import, so that `torch.compile` sees constants.
_installed = {name: importlib.util.find_spec(name) is not None for name in ("triton", "sonicmoe")}


def installed(package: str) -> bool:
    """Return True if an optional package that kernels need is installed."""
    return _installed[package]


def interpreting() -> bool:
    """Return True if Triton's interpreter runs kernels on the CPU, which tests do."""
    # Dynamo cannot trace STORED. To ask for other compilers would be another call of Python.
    if not is_dynamo_compiling() and INTERPRET not in STORED:
        return False
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_nvidia(device: torch.device) -> bool:
    """Return True for an NVIDIA GPU. An AMD GPU (ROCm) also has the device type "cuda" in torch."""
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def _cached_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _capability(device: torch.device) -> tuple[int, int]:
    # torch.compile looks through a cache, and warns of it.
    if is_compiling():
        return torch.cuda.get_device_capability(device)
    return _cached_capability(device)


@functools.cache
def has_large_shared_memory() -> bool:
    """Return True if a program has 227 KiB of shared memory, as on H100, H200 and B200.

    Other GPUs have less. Without a GPU it is True.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)


_NOT_ON_CPU = "its kernels need a CUDA device, not cpu"

# The calls that `triton_unsupported` has allowed on GPUs of NVIDIA: device, dtype, `any_dtype`.
_served: set[tuple[torch.device, torch.dtype, bool]] = set()


def triton_unsupported(x: Tensor, *, on_cpu: bool = True, any_dtype: bool = False) -> str | None:
    """Return the reason why Triton kernels cannot read x, or None.

    on_cpu: False if the interpreter is so slow that it must be requested by name.
    any_dtype: the kernel takes x in the dtype it has.
    """
    if x.is_cpu and on_cpu and installed("triton") and not interpreting():
        return _NOT_ON_CPU  # the first answer, because calls on a CPU wait for it
    device = x.device
    kind = device, x.dtype, any_dtype
    if not is_compiling() and kind in _served and torch.version.hip is None:
        return None
    on_gpu = device.type == "cuda"
    if not on_cpu and not on_gpu and requested() != "triton":
        if interpreting():
            return "Triton's interpreter is slow; ACMOE_BACKEND=triton uses it"
        return f"its kernels need a CUDA device, not {device.type}"
    if not installed("triton"):
        return "triton is not installed"
    if not on_gpu and not interpreting():
        return f"its kernels need a CUDA device, not {device.type}"
    nvidia = on_nvidia(device)
    if on_gpu and not nvidia and requested() != "triton":
        return "its kernels have never run on an AMD GPU; ACMOE_BACKEND=triton tries them"
    if nvidia and _capability(device) < (8, 0):
        return "its kernels need compute capability 8.0 or newer"
    if not any_dtype and x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its kernels have no {x.dtype}"
    if nvidia and not is_compiling():
        _served.add(kind)
    return None
