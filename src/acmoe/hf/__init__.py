"""HuggingFace transformers: the library's own models there, and other people's MoE models here.

Importing this package imports transformers; `import acmoe` does not.
"""

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
]
