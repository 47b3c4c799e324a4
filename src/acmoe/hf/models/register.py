"""Tell transformers' Auto classes which class loads a checkpoint of model type `acmoe`."""

import contextlib

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from acmoe.hf.models.causal_lm import AcmoeForCausalLM
from acmoe.hf.models.config import AcmoeConfig
from acmoe.hf.models.image_classification import AcmoeForImageClassification
from acmoe.hf.models.image_processor import AcmoeImageProcessor
from acmoe.hf.models.sentence_tokenizer import AcmoeSentenceTokenizer
from acmoe.hf.models.sequence_classification import AcmoeForSequenceClassification

__all__ = [
    "AcmoeForCausalLM",
    "AcmoeForImageClassification",
    "AcmoeForSequenceClassification",
    "AcmoeImageProcessor",
    "register_models",
]


def register_models() -> None:
    """Register config, models, tokenizers and image processor; a second call changes nothing."""
    AutoConfig.register("acmoe", AcmoeConfig, exist_ok=True)
    for auto, model in (
        (AutoModelForCausalLM, AcmoeForCausalLM),
        (AutoModelForSequenceClassification, AcmoeForSequenceClassification),
        (AutoModelForImageClassification, AcmoeForImageClassification),
    ):
        auto.register(AcmoeConfig, model, exist_ok=True)
        # Trainer and pipelines look up the name of the class to know what the model does: label
        # smoothing shifts the labels of the language models that this table names.
        auto._model_mapping._model_mapping["acmoe"] = model.__name__
    AutoTokenizer.register(AcmoeConfig, tokenizer_class=AcmoeSentenceTokenizer, exist_ok=True)
    AutoTokenizer.register(AcmoeConfig, tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
    # Older versions have no AutoImageProcessor without torchvision; using it says so.
    with contextlib.suppress(ImportError):
        AutoImageProcessor.register(
            AcmoeConfig, image_processor_classes={"pil": AcmoeImageProcessor}, exist_ok=True
        )
