"""Whether kernels in Gluon, Triton's lower language, can run: ours are written for Hopper."""

import torch
import triton

from acmoe.config.environment import gluon_wanted

_RUN = ("3.6.",)  # versions of Triton whose kernels have run on a card
_COMPILED = ("3.7.",)  # and that compile them to nearly the same instructions


def gluon_obstacle(device: torch.device) -> str | None:
    """What keeps this machine from them; None: nothing."""
    wanted = gluon_wanted()
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels need a CUDA device, not {torch.version.hip or device.type}"
    if wanted == "never":
        return "ACMOE_GLUON=never turns its kernels off"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "its kernels are for compute capability 9"
    if triton.__version__.startswith(_RUN):
        return None
    if not triton.__version__.startswith(_COMPILED):
        return f"its kernels are written for triton 3.6, not {triton.__version__}"
    if wanted == "try":
        return None
    tested = f"its kernels have run with triton 3.6, not yet with {triton.__version__}"
    return f"{tested}; ACMOE_GLUON=try lets them"
