"""Finetune a trained language model as a sentence classifier."""

from acmoe.train.finetune.finetuner import Finetuner
from acmoe.train.finetune.run import (
    PUBLISHED,
    FinetuneReport,
    finetune,
    finetune_folder,
    task_splits,
)

__all__ = [
    "PUBLISHED",
    "FinetuneReport",
    "Finetuner",
    "finetune",
    "finetune_folder",
    "task_splits",
]
