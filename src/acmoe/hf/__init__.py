"""HuggingFace transformers models: find their MoE routers and make them adaptive.

Importing this package imports transformers; `import acmoe` does not.
"""

from acmoe.hf.attach import attach, detach
from acmoe.hf.blend import set_blend
from acmoe.hf.calibrate import calibrate
from acmoe.hf.families import register_family

__all__ = ["attach", "calibrate", "detach", "register_family", "set_blend"]
