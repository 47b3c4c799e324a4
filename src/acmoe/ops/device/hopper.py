"""Decide whether the Hopper kernels, written in Gluon (Triton's low-level language), can run."""

import torch
import triton

from acmoe.config.environment import gluon_requested

SHARED_BYTES = 227 * 1024  # shared memory that a program may have on Hopper
_RUN_VERSIONS = ("3.6.",)  # versions of Triton with which the kernels have run on a GPU
_COMPILED_VERSIONS = ("3.7.",)  # versions that compile them to nearly the same instructions


def gluon_unsupported(device: torch.device) -> str | None:
    """Return the reason why Gluon kernels cannot run on this device, or None if they can."""
    wanted = gluon_requested()
    if device.type != "cuda":
        return f"its kernels need a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return f"its kernels need an NVIDIA GPU, not an AMD one (ROCm {torch.version.hip})"
    if wanted == "never":
        return "ACMOE_GLUON=never turns its kernels off"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "its kernels are for compute capability 9"
    if triton.__version__.startswith(_RUN_VERSIONS):
        return None
    if not triton.__version__.startswith(_COMPILED_VERSIONS):
        return f"its kernels are written for triton 3.6, not {triton.__version__}"
    if wanted == "try":
        return None
    tested = f"its kernels have run with triton 3.6, not yet with {triton.__version__}"
    return f"{tested}; ACMOE_GLUON=try lets them"
