"""Write a run as a folder that `from_pretrained` and the hub read.

config.json, model.safetensors (or shards), README.md, and the tokenizer or image processor are
transformers' files. `acmoe/` holds the run's own: config, vocabulary, metrics, and the state of the
checkpoint, from which `restore.py` makes a run folder again.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import acmoe
from acmoe.errors import check
from acmoe.evaluate.run import CONFIG, METRICS, VOCABULARY, Which
from acmoe.hf.models.card import card_text
from acmoe.hf.models.source import Source, open_source
from acmoe.storage.atomic import report_write_errors
from acmoe.storage.sealed import write_sealed
from acmoe.storage.writable import check_can_fill

RUN_FILES = "acmoe"
EXPORTED = "export.json"


def export_run(
    run: Path | str,
    folder: Path | str,
    *,
    which: Which = "best",
    ema: bool = False,
    max_shard_size: str = "5GB",
) -> Source:
    """Write a checkpoint of a run into a new or empty folder; return what was exported.

    Args:
        run: folder of a language model's run, an image model's run, or a finetuned classifier.
        folder: appears only when it is complete.
        which: the best checkpoint by validation, or the last.
        ema: images: the moving average of the weights.
        max_shard_size: largest safetensors file, as `save_pretrained` takes it.

    Raises:
        UserError: the folder is not empty, or the checkpoint is damaged or holds NaN.
    """
    run, folder = Path(run), Path(folder)
    check(
        re.fullmatch(r"\d+(\.\d+)? *[KMGT]B", str(max_shard_size), re.IGNORECASE) is not None,
        f"the largest file (max_shard_size, --shard-size) is {max_shard_size!r}; give a number "
        "with KB, MB, GB or TB, such as 5GB",
    )
    check_empty(folder)
    source = open_source(run, which, ema)
    with new_folder(folder) as draft:
        source.model.save_pretrained(draft, max_shard_size=max_shard_size)
        source.processor.save_pretrained(draft)
        _copy_run(source, draft / RUN_FILES)
        (draft / "README.md").write_text(card_text(source), encoding="utf-8")
    return source


def check_empty(folder: Path) -> None:
    """Raise a UserError unless the folder is absent or empty, and can be replaced."""
    check(folder.name != "", f"{folder} cannot be replaced by a new folder; give one with a name")
    check_can_fill(folder.parent)  # the draft is written beside the folder
    check(not folder.is_file(), f"{folder} is a file; choose another path for the new folder")
    check(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"{folder} exists and is not empty; choose another folder, or remove it first",
    )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft beside the folder and rename it at the end; an error leaves nothing behind."""
    draft = folder.with_name(f".{folder.name}.draft-{uuid.uuid4().hex[:8]}")
    with report_write_errors(folder):
        try:
            draft.mkdir(parents=True)
            yield draft
            os.replace(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _copy_run(source: Source, target: Path) -> None:
    """Copy the run's own files, and write down which checkpoint was exported."""
    target.mkdir()
    for name in (CONFIG, VOCABULARY, METRICS):
        if (path := source.run.folder / name).is_file():
            shutil.copyfile(path, target / name)
    best = source.state.get("best")
    is_best = isinstance(best, dict) and best.get("step") == source.step
    document = {
        "acmoe": acmoe.__version__,
        "kind": source.kind,
        "step": source.step,
        "ema": source.ema,
        "best": best if is_best else None,
        "records": source.state.get("records"),
    }
    write_sealed(target / EXPORTED, document)
