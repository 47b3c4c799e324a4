"""Make a run folder of an exported one. Weights and statistics are bitwise those of the export.

The result can be evaluated, analysed, finetuned and reported. Optimizer and random generators were
not exported, so training cannot be continued in it.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from acmoe.config.images.train import VISION_RUNS
from acmoe.errors import check
from acmoe.evaluate.run import (
    CHECKPOINTS,
    CONFIG,
    LANGUAGE_RUN,
    METRICS,
    STATE,
    VOCABULARY,
    step_folder,
)
from acmoe.hf.models.causal_lm import AcmoeForCausalLM
from acmoe.hf.models.export import EXPORTED, RUN_FILES, check_empty, new_folder
from acmoe.hf.models.image_classification import AcmoeForImageClassification
from acmoe.models.checkpoint import load, save
from acmoe.storage.atomic import sha256_of
from acmoe.storage.sealed import read_sealed, write_sealed


def restore_run(folder: Path | str, out: Path | str) -> int:
    """Write the run that `export_run` exported to `folder` into `out`; return its step."""
    folder, out = Path(folder), Path(out)
    check_empty(out)
    files = folder / RUN_FILES
    check(
        (files / EXPORTED).is_file(),
        f"{folder} holds no exported run: {files / EXPORTED} is missing; a model trained elsewhere "
        "has no run: save its `model.model` with acmoe.save",
    )
    document = read_sealed(files / EXPORTED, fix="export the run again")
    model = _model(folder, document["kind"])
    with new_folder(out) as draft:
        for name in (CONFIG, VOCABULARY, METRICS):
            if (files / name).is_file():
                shutil.copyfile(files / name, draft / name)
        checkpoint = step_folder(draft / CHECKPOINTS, document["step"])
        save(model.model, checkpoint)
        load(checkpoint)  # raises where a weight is NaN or infinite
        _write_state(checkpoint, document)
    return int(document["step"])


def _model(folder: Path, kind: str) -> PreTrainedModel:
    """Load the exported model, in the dtypes of its files."""
    check(
        kind == LANGUAGE_RUN or kind in VISION_RUNS,
        f"{folder} is a finetuned classifier, whose run needs the optimizer's state; load it with "
        "AutoModelForSequenceClassification, or copy the original folder",
    )
    kinds: dict[bool, type[PreTrainedModel]] = {
        True: AcmoeForCausalLM,
        False: AcmoeForImageClassification,
    }
    found: PreTrainedModel = kinds[kind == LANGUAGE_RUN].from_pretrained(folder, dtype="auto")
    return found


def _write_state(checkpoint: Path, document: dict[str, Any]) -> None:
    """Write state.json with the checksums of the model's files."""
    files = {path.name: sha256_of(path) for path in sorted(checkpoint.iterdir())}
    state = {name: document[name] for name in ("step", "best", "records")}
    write_sealed(checkpoint / STATE, {**state, "files": files})
