"""A callback of the HuggingFace Trainer that keeps statistics with checkpoints of adapters.

Statistics move by themselves in training: the callback is for saving and resuming alone.
"""

import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from acmoe.hf.checkpoints.statistics import FILE, load_statistics, save_statistics


class StatisticsCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Writes the statistics of an attached model into each checkpoint, and loads them on resume.

    Whole models and a `PeftModel` do not need it: their files hold the statistics. It is for models
    with adapters of other kinds, and makes statistics files that `load_statistics` reads. Also
    after load_best_model_at_end the statistics are those of the best checkpoint.

        Trainer(model, arguments, callbacks=[acmoe.hf.StatisticsCallback()], ...)

    resume_from: The checkpoint's directory, where `trainer.train(resume_from_checkpoint=...)` gets
    one that is not in `output_dir`.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None) -> None:
        self.resume_from = resume_from

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the statistics of the checkpoint that training goes on from, if any."""
        if state.global_step > 0 and model is not None:
            load_statistics(model, self.resume_from or self._resumed(args, state))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the statistics into the checkpoint that was just saved."""
        if state.is_world_process_zero and model is not None:
            save_statistics(model, self._checkpoint(args, state))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the statistics of the best checkpoint, whose weights the Trainer has loaded."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and model is not None:
            load_statistics(model, best)

    def _checkpoint(self, args: TrainingArguments, state: TrainerState) -> Path:
        assert args.output_dir is not None
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"

    def _resumed(self, args: TrainingArguments, state: TrainerState) -> Path:
        named = args.resume_from_checkpoint
        if isinstance(named, str) and (Path(named) / FILE).is_file():
            return Path(named)
        return self._checkpoint(args, state)
