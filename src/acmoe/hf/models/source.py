"""Open a run folder for export: its model as a transformers model, its tokenizer, its figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from acmoe.config.images.train import VISION_RUNS
from acmoe.config.serialize import from_document
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.text.sentences import task_of
from acmoe.data.text.vocabulary import Vocabulary, WordVocabulary, load_vocabulary
from acmoe.errors import check
from acmoe.evaluate.run import (
    CONFIG,
    STATE,
    VOCABULARY,
    RunFolder,
    Which,
    checked_metrics,
    open_image_run,
    open_run,
    read_json,
    run_kind,
)
from acmoe.hf.models.causal_lm import AcmoeForCausalLM
from acmoe.hf.models.config import AcmoeConfig
from acmoe.hf.models.image_classification import AcmoeForImageClassification
from acmoe.hf.models.image_processor import AcmoeImageProcessor
from acmoe.hf.models.sequence_classification import AcmoeForSequenceClassification
from acmoe.hf.models.tokenizers import published_tokenizer, sentence_tokenizer, tokenizer_of
from acmoe.models.checkpoint import load
from acmoe.train.checkpoint import TENSORS, CheckpointStore, first_nonfinite
from acmoe.train.finetune.classifier import classification_head

FINETUNED = "finetuned"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a run, ready to be written in the format of the hub."""

    run: RunFolder
    kind: str  # language-run, swin-run, softmoe-run or finetuned
    model: PreTrainedModel
    processor: Any  # tokenizer or image processor
    data: str  # name of the data set
    steps: int | float | None  # length of the run, in `unit`
    unit: str  # steps or epochs
    step: int  # step of the checkpoint
    state: dict[str, Any]  # its state.json
    ema: bool  # the model has averaged weights

    def figures(self) -> dict[str, Any]:
        """Return the validation record of the checkpoint's step; {} if it was not validated."""
        wanted = "epoch" if self.kind == FINETUNED else "valid"
        found = [
            record
            for record in checked_metrics(self.run.folder)[0]
            if record["kind"] == wanted and record["step"] == self.step
        ]
        return found[-1] if found else {}


def open_source(folder: Path, which: Which, ema: bool) -> Source:
    """Open the best or last checkpoint of a run of text, images or finetuning.

    ema: take the averaged weights, which runs of images have.
    """
    kind = run_kind(folder)
    if kind in VISION_RUNS:
        return _image_run(folder, kind, which, ema)
    check(not ema, f"--ema is for images, and {folder} is a run of text; leave it out")
    if "task" in read_json(folder / CONFIG).get("config", {}):
        return _finetuned(folder, which)
    return _language_run(folder, kind, which)


def _language_run(folder: Path, kind: str, which: Which) -> Source:
    run = open_run(folder)
    model = run.model(which)
    tokenizer = tokenizer_of(run.vocabulary())
    config = AcmoeConfig.of(model.config)
    return Source(
        run=run,
        kind=kind,
        model=AcmoeForCausalLM(config, model).eval(),
        processor=tokenizer,
        data=run.config.data.name,
        steps=run.config.steps,
        unit="steps",
        step=run.step(which),
        state=read_json(run.checkpoint(which) / STATE),
        ema=False,
    )


def _image_run(folder: Path, kind: str, which: Which, ema: bool) -> Source:
    run = open_image_run(folder)
    model = run.model(which, ema=ema)
    data = run.config.data
    config = AcmoeConfig.of(model.config, **_labels(run.images().classes))
    return Source(
        run=run,
        kind=kind,
        model=AcmoeForImageClassification(config, model).eval(),
        processor=AcmoeImageProcessor.of(data),
        data=data.name if data.source is None else data.source,
        steps=run.config.steps or run.config.epochs,
        unit="steps" if run.config.steps else "epochs",
        step=run.step(which),
        state=read_json(run.checkpoint(which) / STATE),
        ema=ema,
    )


def _finetuned(folder: Path, which: Which) -> Source:
    path = folder / CONFIG
    config = from_document(read_json(path), FinetuneConfig, str(path))
    run = RunFolder(folder=folder)
    checkpoint = run.checkpoint(which)
    backbone: Any = load(checkpoint)
    classes = task_of(config.task).classes
    head = _head(checkpoint, backbone.config.dim, len(classes), config)
    vocabulary = _finetuned_vocabulary(folder, config)
    clean = config.form == "clean"
    assert clean or isinstance(vocabulary, WordVocabulary)
    tokenizer = sentence_tokenizer(vocabulary) if clean else published_tokenizer(vocabulary)  # type: ignore[arg-type]
    common = AcmoeConfig.of(
        backbone.config,
        head=config.form,
        head_dropout=config.dropout,
        **_labels(classes),
    )
    return Source(
        run=run,
        kind=FINETUNED,
        model=AcmoeForSequenceClassification(common, backbone, head).eval(),
        processor=tokenizer,
        data=config.task,
        steps=config.epochs,
        unit="epochs",
        step=run.step(which),
        state=read_json(checkpoint / STATE),
        ema=False,
    )


def _head(checkpoint: Path, dim: int, classes: int, config: FinetuneConfig) -> nn.Module:
    """Read the classification head from the training tensors of a checkpoint."""
    tensors, _ = CheckpointStore(checkpoint.parent, keep=1).read(checkpoint)
    stored = {key.removeprefix("head/"): v for key, v in tensors.items() if key[:5] == "head/"}
    bad = first_nonfinite(stored)
    check(bad is None, f"{checkpoint / TENSORS}: head {bad}; finetune again, into another folder")
    head = classification_head(dim, classes, config.form, config.dropout)
    head.load_state_dict(stored)
    return head


def _finetuned_vocabulary(folder: Path, config: FinetuneConfig) -> Vocabulary:
    """Read the vocabulary of a finetuned model; the clean form has that of the run around it."""
    places = [folder / VOCABULARY]
    if config.form == "clean":
        places.append(folder.parent.parent / VOCABULARY)
    found = next((path for path in places if path.is_file()), None)
    check(
        found is not None,
        f"{places[0]} is missing; give the same `acmoe finetune` command again, which writes it",
    )
    assert found is not None
    return load_vocabulary(found)


def _labels(classes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }
