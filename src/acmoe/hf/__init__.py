"""HuggingFace transformers: its MoE models made adaptive, our kernels there, and our models there.

    attach, detach, calibrate, set_blend    adaptive routers in anybody's MoE model
    experts_implementation="acmoe"          the library's kernels for its experts
    AcmoeFor...                             this library's models as transformers models

Importing this package imports transformers and registers what it adds there; `import acmoe` does
neither.
"""

from acmoe.hf.attach import attach, detach
from acmoe.hf.blend import set_blend
from acmoe.hf.calibrate import calibrate
from acmoe.hf.experts import experts_reason
from acmoe.hf.families import register_family
from acmoe.hf.models.config import AcmoeConfig
from acmoe.hf.models.register import (
    AcmoeForCausalLM,
    AcmoeForImageClassification,
    AcmoeForSequenceClassification,
    AcmoeImageProcessor,
    register_models,
)

register_models()

__all__ = [
    "AcmoeConfig",
    "AcmoeForCausalLM",
    "AcmoeForImageClassification",
    "AcmoeForSequenceClassification",
    "AcmoeImageProcessor",
    "attach",
    "calibrate",
    "detach",
    "experts_reason",
    "register_family",
    "set_blend",
]
