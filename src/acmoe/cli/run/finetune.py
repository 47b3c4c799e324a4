"""`acmoe finetune RUN --task sst2|sst5|banking77`: finetune a run on classification."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from acmoe.cli.arguments.shared import Device, Json, TrainThreads
from acmoe.storage.strict_json import json_text


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Finetune a pretrained run on sentence classification. A repeated command continues it."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the pretrained run."""
    task: Literal["sst2", "sst5", "banking77"]
    """The task: a data set of labelled sentences."""
    data: Path | None = None
    """Folder with the task's prepared data; data/TASK if not given."""
    out: Path | None = None
    """Folder of the finetuning; RUN/finetune/TASK-FORM-seedSEED if not given."""
    form: Literal["clean", "paper"] = "clean"
    """clean: use the pretraining vocabulary, mask padding, and classify by the last real token.
    paper: do as the published code does."""
    epochs: int | None = None
    """Number of passes over the training sentences; the task's own if not given."""
    lr: float | None = None
    """Learning rate; the task's own if not given."""
    batch: int | None = None
    """Sentences per update; 16 if not given."""
    which: Literal["best", "last"] = "best"
    """The checkpoint of the pretrained run: the best by validation, or the last."""
    seed: int = 0
    """Seed of the head's initial weights, dropout and the order of sentences."""
    device: Device = "auto"
    threads: TrainThreads = None
    json: Json = False

    def run(self) -> int:
        from acmoe.config.text.finetune import finetune_config
        from acmoe.evaluate.run import open_run
        from acmoe.train.finetune import PUBLISHED, finetune, finetune_folder
        from acmoe.train.threads import choose_threads, use_threads

        chosen: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "batch": self.batch}
        config = replace(
            finetune_config(self.task, self.form),
            which=self.which,
            seed=self.seed,
            device=self.device,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        data, run = self.data or Path("data") / self.task, open_run(self.folder)
        out = self.out or finetune_folder(run.folder, config)
        threads = choose_threads(self.threads, run.config.model, device=self.device, run=out)
        use_threads(threads)
        console = Console(stderr=True)
        report = finetune(run, config, data, out=out, console=console, note=threads.message)
        if self.json:
            print(json_text(report.to_json()))
        else:
            drawn = "" if report.splits == PUBLISHED else f"; {report.splits}"
            print(
                f"{report.task} ({report.form} form): test accuracy {report.test_accuracy:.2f}% "
                f"on {report.sentences['test']:,} sentences (most frequent class "
                f"{report.majority:.2f}%), chosen by dev accuracy {report.dev_accuracy:.2f}% at "
                f"epoch {report.best_epoch}{drawn}; {report.folder}"
            )
        return 0
