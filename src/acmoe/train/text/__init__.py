"""Train a language model on streams of text, on one process or as a pipeline of several."""

from acmoe.train.text.pipeline_trainer import text_trainer
from acmoe.train.text.trainer import TextTrainer, TextValidation, checked_corpus

__all__ = ["TextTrainer", "TextValidation", "checked_corpus", "text_trainer"]
