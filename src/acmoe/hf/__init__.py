"""HuggingFace transformers: adaptive routers in its MoE models, and our kernels for its experts.

Importing this package imports transformers and registers what it adds there; `import acmoe` does
neither.
"""

from acmoe.hf.attach import attach, detach
from acmoe.hf.blend import set_blend
from acmoe.hf.calibrate import calibrate
from acmoe.hf.experts import experts_reason
from acmoe.hf.families import register_family

__all__ = [
    "attach",
    "calibrate",
    "detach",
    "experts_reason",
    "register_family",
    "set_blend",
]
