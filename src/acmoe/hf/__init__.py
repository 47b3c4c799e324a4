"""HuggingFace transformers: its MoE models made adaptive, our kernels there, and our models there.

    attach, detach, calibrate, set_blend    adaptive routers in anybody's MoE model
    Adaptive...ForCausalLM, ...             classes of attached models, which save and load them
    save_statistics, load_statistics,       their statistics beside adapters of PEFT
        StatisticsCallback
    experts_implementation="acmoe"          the library's kernels for its experts
    AcmoeFor...                             this library's models as transformers models

Importing this package imports transformers and registers what it adds there; `import acmoe` does
neither.
"""

from typing import TYPE_CHECKING, Any

from acmoe.hf.attach import attach, detach
from acmoe.hf.blend import set_blend
from acmoe.hf.calibrate import calibrate
from acmoe.hf.checkpoints.adapters import follow_peft, follow_transformers
from acmoe.hf.checkpoints.auto import NAME as _NAME
from acmoe.hf.checkpoints.auto import know_all_types
from acmoe.hf.checkpoints.classes import adaptive_class, adaptive_config_class
from acmoe.hf.checkpoints.plain_load import follow_loading
from acmoe.hf.checkpoints.statistics import load_statistics, save_statistics
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

if TYPE_CHECKING:  # at run time by __getattr__
    from acmoe.hf.checkpoints.trainer import StatisticsCallback as StatisticsCallback

know_all_types(adaptive_config_class)
follow_peft()
follow_transformers()
follow_loading()
register_models()

__all__ = [
    "AcmoeConfig",
    "AcmoeForCausalLM",
    "AcmoeForImageClassification",
    "AcmoeForSequenceClassification",
    "AcmoeImageProcessor",
    "StatisticsCallback",
    "adaptive_class",
    "attach",
    "calibrate",
    "detach",
    "experts_reason",
    "load_statistics",
    "register_family",
    "save_statistics",
    "set_blend",
]


def __getattr__(name: str) -> Any:
    """Import the callback, and make classes such as `AdaptiveMixtralForCausalLM`, when asked."""
    if name == "StatisticsCallback":
        from acmoe.hf.checkpoints.trainer import StatisticsCallback

        return StatisticsCallback
    if name.startswith(_NAME):
        import transformers

        plain = getattr(transformers, name.removeprefix(_NAME), None)
        if isinstance(plain, type) and issubclass(plain, transformers.PreTrainedModel):
            return adaptive_class(plain)
        if isinstance(plain, type) and issubclass(plain, transformers.PreTrainedConfig):
            return adaptive_config_class(plain)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
