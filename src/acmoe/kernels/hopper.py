"""Whether kernels in Gluon, Triton's lower language, can run: ours are written for Hopper."""

import os

import torch
import triton

from acmoe.errors import UserError

_RUN = ("3.6.",)  # versions of Triton whose kernels have run on a card
_COMPILED = ("3.7.",)  # and that compile them to nearly the same instructions: gluon_names.py


def gluon_obstacle(device: torch.device) -> str | None:
    """What keeps this machine from them; None: nothing. ACMOE_GLUON may be auto, try or never."""
    wanted = os.environ.get("ACMOE_GLUON", "auto")
    if wanted not in ("auto", "try", "never"):
        raise UserError(f"ACMOE_GLUON={wanted!r} is unknown; choose auto, try or never")
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
