"""`acmoe finetune RUN --task sst2|sst5|banking77`."""

import json as json_format
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Finetune a pretrained run on sentence classification; interrupted, it continues."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The pretrained run's folder."""
    task: Literal["sst2", "sst5", "banking77"]
    """Which sentences."""
    data: Path | None = None
    """The task's prepared folder; data/TASK if not given."""
    form: Literal["clean", "paper"] = "clean"
    """clean: pretraining vocabulary, masked padding, last real token; paper: the published code."""
    epochs: int | None = None
    """Passes over the training sentences; the task's own if not given."""
    lr: float | None = None
    """Learning rate; the task's own if not given."""
    batch: int | None = None
    """Sentences of an update."""
    which: Literal["best", "last"] = "best"
    """Checkpoint of the pretrained run."""
    seed: int = 0
    """Of the head's first weights, dropout and order."""
    device: str = "auto"
    """cuda where there is one."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        from acmoe.config.text.finetune import finetune_config
        from acmoe.train.finetune import finetune

        chosen: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "batch": self.batch}
        config = replace(
            finetune_config(self.task, self.form),
            which=self.which,
            seed=self.seed,
            device=self.device,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        data = self.data or Path("data") / self.task
        report = finetune(self.folder, config, data, console=Console(stderr=True))
        if self.json:
            print(json_format.dumps(report.to_json(), indent=2))
        else:
            print(
                f"{report.task} ({report.form} form): test accuracy {report.test_accuracy:.2f}% "
                f"on {report.sentences['test']:,} sentences (most frequent class "
                f"{report.majority:.2f}%), chosen by dev accuracy {report.dev_accuracy:.2f}% at "
                f"epoch {report.best_epoch}; {report.folder}"
            )
        return 0
