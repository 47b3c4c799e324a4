"""Config of finetuning on sentence classification, in a clean form and in the paper's form."""

from dataclasses import dataclass
from typing import Literal

from acmoe.config.updates import Precision, check_device
from acmoe.errors import check, check_choice, check_not_negative, check_positive

Form = Literal["clean", "paper"]


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """One finetuning run.

    form="clean" keeps the pretraining vocabulary and its embedding, masks padding, classifies the
    last real token with one linear layer, and shuffles the sentences. form="paper" follows the
    published code: it rebuilds the vocabulary from the task (with a new embedding), lowers case,
    pads on the left without a mask, classifies the last position with three layers and a
    log-softmax between them, and keeps the order of the sentences.
    """

    task: str  # sst2, sst5 or banking77
    form: Form = "clean"  # ours, or that of the published code; see above
    epochs: int  # passes over the sentences
    lr: float  # learning rate of Adam
    batch: int = 16  # sentences per optimizer update
    split: int = 1  # micro-batches per optimizer update
    dropout: float = 0.1  # as in LanguageConfig
    which: Literal["best", "last"] = "best"  # checkpoint of the pretraining run
    precision: Precision = "fp32"  # bf16: autocast; weights stay float32
    seed: int = 0  # draws the new layers, the order of sentences and dropout
    device: str = "auto"  # auto: the first of cuda, xpu, mps and cpu that torch finds

    def __post_init__(self) -> None:
        check_choice(self.task, tuple(_TASKS), "task")
        check_choice(self.form, ("clean", "paper"), "form")
        check_choice(self.which, ("best", "last"), "which")
        check_choice(self.precision, ("fp32", "bf16"), "precision")
        for name in ("epochs", "batch", "split"):
            value = getattr(self, name)
            check(value >= 1, f"{name}={value}; it must be at least 1")
        check_positive(self.lr, "lr")
        check(0 <= self.dropout < 1, f"dropout={self.dropout}; it must lie in [0, 1)")
        check_not_negative(self.seed, "seed")
        check_device(self.device)


# Task -> epochs, learning rate of the published scripts, learning rate of the paper's text.
_TASKS = {
    "sst2": (5, 1e-4, 1e-3),
    "sst5": (5, 1e-4, 1e-3),
    "banking77": (50, 1e-5, 1e-5),
}


def finetune_config(task: str, form: Form = "clean") -> FinetuneConfig:
    """Return the settings of a task; the clean form takes the learning rate of the scripts."""
    check_choice(task, tuple(_TASKS), "task")
    epochs, scripts, text = _TASKS[task]
    if form == "paper":
        return FinetuneConfig(task=task, form=form, epochs=epochs, lr=text, split=2)
    return FinetuneConfig(task=task, form=form, epochs=epochs, lr=scripts)
