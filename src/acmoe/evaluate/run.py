"""Read access to the folder of a training run.

config.json      the config of the run; `kind` names its class, and is absent for language models
vocabulary.json  the vocabulary, so that a run can be used without its corpus
metrics.jsonl    one record per line
starts.jsonl     one line per start of the training: command, commit, versions, device
checkpoints/     step-00001000/ and so on: a model (read by `acmoe.load`) and the training state;
                 ema/ in it: the model with averaged weights, where the run keeps an average
attacks/         results of attacks on an image model
evaluation-*.json  scores of `acmoe evaluate`
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from acmoe.config.images.train import VISION_RUNS, VisionRunConfig
from acmoe.config.serialize import from_document
from acmoe.config.text.data import PrepareConfig
from acmoe.config.text.train import DataConfig, RunConfig
from acmoe.data.images.load import load_images
from acmoe.data.images.splits import ImageSplits
from acmoe.data.text.corpus import MANIFEST, Corpus, load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.data.text.registry import dataset, how_to_prepare
from acmoe.data.text.vocabulary import Vocabulary, load_vocabulary
from acmoe.errors import UserError, check
from acmoe.evaluate.same_data import check_corpus, check_images, check_present
from acmoe.models.checkpoint import load
from acmoe.models.images.classifier import ImageClassifier
from acmoe.models.text.decoder import LanguageModel
from acmoe.storage.atomic import sha256_of
from acmoe.storage.lines import read_lines
from acmoe.storage.sealed import read_sealed

CONFIG = "config.json"
VOCABULARY = "vocabulary.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
STATE = "state.json"
EMA = "ema"

LANGUAGE_RUN = "language-run"
ATTACKS = "attacks"

Which = Literal["best", "last"]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The folder of a run that has been started."""

    folder: Path

    def checkpoint(self, which: Which = "best") -> Path:
        """Return the folder of the best checkpoint in validation, or of the latest one."""
        found = checkpoints(self.folder / CHECKPOINTS)
        check(bool(found), f"{self.folder} has no checkpoint yet; train it further")
        if which == "last":
            return found[-1]
        state = read_json(found[-1] / STATE)
        best = state.get("best")
        # A run that stopped before its first validation has no best checkpoint yet.
        if best is None:
            return found[-1]
        check(
            isinstance(best, dict) and type(best.get("step")) is int,
            f"{found[-1] / STATE} has best={best!r}, which names no step; use the last checkpoint",
        )
        return step_folder(found[-1].parent, best["step"])

    def step(self, which: Which = "best") -> int:
        """Return the number of updates before that checkpoint."""
        return int(self.checkpoint(which).name.split("-")[1])

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind, `train` or `valid`, in order of steps.

        Warns where records are damaged or missing.
        """
        records, notes = checked_metrics(self.folder)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return [record for record in records if record["kind"] == kind]


@dataclass(frozen=True, kw_only=True)
class Run(RunFolder):
    """A training run of a language model."""

    config: RunConfig

    def model(self, which: Which = "best", *, device: torch.device | str = "cpu") -> LanguageModel:
        return cast(LanguageModel, _load(self.checkpoint(which), self.config, device))

    def vocabulary(self) -> Vocabulary:
        path = self.folder / VOCABULARY
        digest = read_json(self.folder / CONFIG).get("vocabulary_sha256")  # absent in version 0.1
        check(
            digest is None or (path.is_file() and sha256_of(path) == digest),
            f"{path} is missing or was changed after it was written: its checksum differs; restore "
            "it from a copy",
        )
        return load_vocabulary(path)

    def corpus(self) -> Corpus:
        """Open the corpus of the run's config; see `check_corpus` for what it checks."""
        if self.config.data.name != "stdlib":  # `stdlib` is prepared when it is missing
            check_present(self.folder, self.config.data.path)
        corpus = open_corpus(self.config.data)
        own = self.vocabulary() if (self.folder / VOCABULARY).is_file() else None
        check_corpus(self.folder, corpus, own, last_state(self.folder))
        return corpus


@dataclass(frozen=True, kw_only=True)
class ImageRun(RunFolder):
    """A training run of an image classifier."""

    config: VisionRunConfig

    def model(
        self, which: Which = "best", *, ema: bool = False, device: torch.device | str = "cpu"
    ) -> ImageClassifier:
        """Load a checkpoint's model; with `ema`, the one with the moving average of the weights."""
        folder = self.checkpoint(which)
        if ema:
            check(
                (folder / EMA).is_dir(),
                f"{self.folder} keeps no moving average of its weights; train with ema=0.99996, or "
                "leave out ema",
            )
            folder = folder / EMA
        return cast(ImageClassifier, _load(folder, self.config, device))

    def images(self, *, warn: bool = True) -> ImageSplits:
        """Open the images of the run's config; see `check_images` for what it checks.

        `warn` is that of `load_images`.
        """
        data = self.config.data
        if data.source is not None and data.name in ("folder", "arrays"):
            check_present(self.folder, Path(data.source))
        images = load_images(data, warn=warn)
        check_images(self.folder, images, last_state(self.folder))
        return images


def _load(
    folder: Path, config: RunConfig | VisionRunConfig, device: torch.device | str
) -> nn.Module:
    """Load the model of a checkpoint, which must be the model that the run's config describes."""
    model = load(folder, device=device)
    check(
        model.config == config.model,
        f"{folder} holds another model than its run's {CONFIG} describes; put the checkpoint into "
        "the folder of its own run",
    )
    return model


def open_run(folder: Path | str) -> Run:
    """Open the folder of a language model's run."""
    path, kind = Path(folder) / CONFIG, run_kind(folder)
    check(
        kind not in VISION_RUNS,
        f"{folder} is a run of an image model ({kind}); this takes a run of a language model",
    )
    document = read_json(path)
    check(
        not is_finetuning(document),
        f"{folder} is a finetuning, a classifier of sentences; this takes a run of a language "
        "model, such as the pretrained one",
    )
    return Run(folder=path.parent, config=from_document(document, RunConfig, str(path)))


def is_finetuning(document: dict[str, Any]) -> bool:
    """Return True for the config.json of `acmoe finetune`, which alone names a task."""
    config = document.get("config")
    return isinstance(config, dict) and "task" in config


def open_image_run(folder: Path | str) -> ImageRun:
    """Open the folder of an image classifier's run."""
    path, kind = Path(folder) / CONFIG, run_kind(folder)
    check(
        kind in VISION_RUNS,
        f"{folder} is a {kind}; this takes a run of an image model, such as one of `acmoe train "
        "swin-nano`",
    )
    config = from_document(read_json(path), VISION_RUNS[kind], str(path))
    return ImageRun(folder=path.parent, config=config)


def run_kind(folder: Path | str) -> str:
    """Return the kind of a run from its config.json, `language-run` for language models."""
    path = Path(folder) / CONFIG
    check(not Path(folder).is_file(), f"{folder} is a file; give the folder of a run")
    check(path.is_file(), f"{folder} is no run: {path} is missing; give a run of `acmoe train`")
    document = read_json(path)
    check(
        not document.keys() >= {"family", "weights"},
        f"{folder} is a saved model, such as a checkpoint of a run; give the folder of the run",
    )
    kind = document.get("kind", LANGUAGE_RUN)
    check(isinstance(kind, str), f"{path} is damaged: its kind is {kind!r}; restore it")
    return str(kind)


def open_corpus(data: DataConfig) -> Corpus:
    """Open the corpus of a config. Only the standard library is prepared if it is missing."""
    entry, folder = dataset(data.name), data.path
    check(
        entry.kind != "sentences",
        f"data.name={data.name} is a finetuning task, not a corpus; choose one of `acmoe data "
        "list`, or give the task to `acmoe finetune`",
    )
    if data.name == "stdlib" and not (folder / MANIFEST).is_file():
        prepare("stdlib", None, folder, config=PrepareConfig(limit=data.limit))
    check(
        (folder / MANIFEST).is_file(),
        f"{entry.title} is not prepared in {folder}; {how_to_prepare(data.name, folder)}; or set "
        "data.folder",
    )
    corpus = load_corpus(folder)
    check(
        corpus.name == data.name,
        f"{folder} holds {corpus.name!r}, not data.name={data.name!r}; change data.folder",
    )
    limit = corpus.manifest.options.get("limit")
    check(
        data.name != "stdlib" or limit == data.limit,
        f"{folder} was prepared with limit={limit}, not data.limit={data.limit}; set it to that, "
        "or data.folder to another folder",
    )
    return corpus


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first. Incomplete ones have other names."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that this library wrote; raise where it is damaged."""
    return read_sealed(path, fix="restore it from a copy, or make it again")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file that have a step and a kind; skip damaged lines."""
    return [record for record in read_lines(path).records if is_metric(record)]


def checked_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of a run's metrics, and lines that say which of them are lost."""
    step, count = _saved_records(folder)  # before the metrics: another process may be writing
    path = folder / METRICS
    lines = read_lines(path)
    records = [record for record in lines.records if is_metric(record)]
    notes = [complaint] if (complaint := lines.complaint(path)) else []
    if len(records) < len(lines.records):
        left = len(lines.records) - len(records)
        notes.append(f"{path}: {left} lines are no records; left out")
    missing = missing_records(path, records, step, count)
    return records, [*notes, *([missing] if missing else [])]


def missing_records(
    path: Path, records: Sequence[Mapping[str, Any]], step: int, count: int | None
) -> str | None:
    """Return a note if records up to `step` are missing, or None.

    count: the number of records up to `step` that the checkpoint of that step has saved; None if it
    has saved no number. Without this count, a file that was cut off between two lines would look
    complete.
    """
    found = sum(record["step"] <= step for record in records)
    if count is None or found >= count:
        return None
    return f"{path}: {count - found} of the {count} records up to step {step} are missing"


def last_state(folder: Path) -> dict[str, Any]:
    """Return state.json of the last checkpoint, or {} if none is there or it is damaged."""
    found = checkpoints(folder / CHECKPOINTS)
    try:
        return read_json(found[-1] / STATE) if found else {}
    except UserError:
        return {}  # loading or resuming the checkpoint reports this


def _saved_records(folder: Path) -> tuple[int, int | None]:
    """Return the step of the last checkpoint, and the number of records written before it."""
    state = last_state(folder)
    step, count = state.get("step"), state.get("records")  # the second is absent in version 0.1
    return (step, count) if type(step) is int and type(count) is int else (0, None)


def is_metric(record: dict[str, Any]) -> bool:
    """Return True for a record with an integer step and the name of its kind."""
    return type(record.get("step")) is int and isinstance(record.get("kind"), str)
