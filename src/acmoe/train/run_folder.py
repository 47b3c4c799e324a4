"""The folder of a run: one process at a time may use it, and its config never changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import acmoe
from acmoe.config.serialize import differences, from_document, to_document
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.text.vocabulary import Vocabulary, save_vocabulary
from acmoe.errors import check
from acmoe.evaluate.run import (
    CONFIG,
    LANGUAGE_RUN,
    METRICS,
    VOCABULARY,
    is_finetuning,
    read_json,
    run_kind,
)
from acmoe.storage.atomic import DRAFT, replacing, report_write_errors, sha256_of
from acmoe.storage.lock import locked
from acmoe.storage.sealed import write_sealed
from acmoe.storage.writable import check_can_fill

LOCK = "lock"


def check_free(folder: Path, config: Any) -> None:
    """Raise a UserError if `claim` would refuse the folder for its content, and write nothing.

    It is called before data are prepared, which may take long.
    """
    check_can_fill(folder)
    if (folder / CONFIG).is_file():
        _check_same(folder / CONFIG, config)
    elif folder.is_dir():
        _check_empty(folder)


@contextmanager
def claim(folder: Path, config: Any, vocabulary: Vocabulary | None = None) -> Iterator[None]:
    """Lock the folder for a run of that config, and write config and vocabulary into it.

    The folder must be new, or a run folder that was started with the same config. An error before
    the run has written anything else removes the new config again: it may lie in a setting that
    only the model or the data refuse, and the corrected command must find no other config.
    """
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).is_file():
        _check_empty(folder)  # before the lock, which would leave a file in somebody's folder
    in_use = f"{folder} is in use by process {{owner}}; wait for it, or choose another folder"
    with locked(folder / LOCK, in_use=in_use):
        begun = _fill(folder, config, vocabulary)
        try:
            yield
        except Exception:
            if not begun and folder.is_dir() and not _other_files(folder):
                (folder / CONFIG).unlink(missing_ok=True)
            raise


def _fill(folder: Path, config: Any, vocabulary: Vocabulary | None) -> bool:
    """Write config and vocabulary into a locked folder; return True if they were there before."""
    with report_write_errors(folder):
        for draft in _drafts():  # a process that was killed left them
            (folder / draft).unlink(missing_ok=True)
    path = folder / CONFIG
    begun = path.is_file()
    if begun:
        _check_same(path, config)
    else:
        _check_empty(folder)
    if vocabulary is not None:
        begun_with = read_json(path).get("vocabulary_sha256") if begun else None
        write_vocabulary(vocabulary, folder, digest=begun_with)
    if not begun:
        _write_config(path, config)
    return begun


def _drafts() -> list[str]:
    """Return the names under which files are written before they get their own."""
    return [f".{name}{DRAFT}" for name in (CONFIG, VOCABULARY, METRICS)]


def _check_empty(folder: Path) -> None:
    """Raise a UserError if a folder without a config holds files of somebody else."""
    found = [name for name in _other_files(folder) if name not in _drafts()]
    check(
        not found,
        f"{folder} holds {', '.join(found[:3])} and is no run folder; choose another",
    )


def _other_files(folder: Path) -> list[str]:
    """Return the names in the folder, without those of the files that `claim` writes."""
    own = {LOCK, VOCABULARY, CONFIG}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in own)


def _write_config(path: Path, config: Any) -> None:
    """Write config.json, with the checksum of the vocabulary file if the folder has one."""
    kind = {"kind": config.kind} if hasattr(config, "kind") else {}
    vocabulary = path.with_name(VOCABULARY)
    digest = {"vocabulary_sha256": sha256_of(vocabulary)} if vocabulary.is_file() else {}
    write_sealed(path, {"acmoe": acmoe.__version__, **kind, **digest, **to_document(config)})


def _check_same(path: Path, config: Any) -> None:
    kind, wanted = run_kind(path.parent), getattr(config, "kind", LANGUAGE_RUN)
    if is_finetuning(read_json(path)):
        kind = "finetuning"
    if isinstance(config, FinetuneConfig):
        wanted = "finetuning"
    check(kind == wanted, f"{path.parent} holds a {kind}, not a {wanted}; choose another folder")
    stored = from_document(read_json(path), type(config), str(path))
    # `keep` changes no number of a run, and its default has changed. A run may be continued on
    # another number of processes, and of micro-batches.
    free = ("keep=", "parallel.", "split=")
    found = [one for one in differences(stored, config) if not one.startswith(free)]
    check(
        not found,
        f"{path.parent} was begun with {'; '.join(found)}; repeat the settings it was begun with "
        "to continue it, or choose another folder",
    )


def write_vocabulary(vocabulary: Vocabulary, folder: Path, *, digest: str | None = None) -> None:
    """Write the meaning of the token ids into the folder atomically.

    With the `digest` of the vocabulary that the run was begun with, another vocabulary raises a
    UserError and leaves the file as it is: the run's checkpoints need the one that is there.
    """
    with replacing(folder / VOCABULARY) as draft:
        save_vocabulary(vocabulary, draft)
        check(
            digest is None or sha256_of(draft) == digest,
            f"{folder} was begun with another vocabulary than its corpus has now; prepare that "
            "corpus again, or choose another run folder",
        )
