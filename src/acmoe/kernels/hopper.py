"""Whether kernels in Gluon, Triton's lower language, can run: ours are written for Hopper."""

import torch
import triton

# Gluon's functions still change their names from version to version.
_KNOWN_VERSIONS = ("3.6.",)


def gluon_obstacle(device: torch.device) -> str | None:
    """What keeps this machine from them; None: nothing."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels need a CUDA device, not {torch.version.hip or device.type}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "its kernels are for compute capability 9"
    if not triton.__version__.startswith(_KNOWN_VERSIONS):
        return f"its kernels were tested with triton 3.6, not {triton.__version__}"
    return None
