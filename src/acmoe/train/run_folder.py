"""The folder of a run: one process at a time may use it, and its config never changes."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import acmoe
from acmoe.config.serialize import differences, from_document, to_document
from acmoe.data.text.vocabulary import Vocabulary, save_vocabulary
from acmoe.errors import UserError, check
from acmoe.evaluate.run import CONFIG, LANGUAGE_RUN, VOCABULARY, read_json, run_kind
from acmoe.train.checkpoint import write_text

if sys.platform != "win32":
    import fcntl

LOCK = "lock"


@contextmanager
def claim(folder: Path, config: Any, vocabulary: Vocabulary | None = None) -> Iterator[None]:
    """Lock the folder for a run of that config, and write config and vocabulary into it.

    The folder must be new, or a run folder that was started with the same config.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from error
    with _locked(folder):
        for draft in folder.glob(".*.draft"):
            draft.unlink()
        path = folder / CONFIG
        if path.is_file():
            _check_same(path, config)
        else:
            other_files = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
            check(
                not other_files,
                f"{folder} holds {', '.join(other_files[:3])} and is no run folder; choose another",
            )
            kind = {"kind": config.kind} if hasattr(config, "kind") else {}
            document = {"acmoe": acmoe.__version__, **kind, **to_document(config)}
            write_text(path, json.dumps(document, indent=2) + "\n")
        if vocabulary is not None:
            _write_vocabulary(vocabulary, folder)
        yield


def _check_same(path: Path, config: Any) -> None:
    kind, wanted = run_kind(path.parent), getattr(config, "kind", LANGUAGE_RUN)
    check(kind == wanted, f"{path.parent} holds a {kind}, not a {wanted}; choose another folder")
    stored = from_document(read_json(path), type(config), str(path))
    found = differences(stored, config)
    check(
        not found,
        f"{path.parent} was begun with {'; '.join(found)}; repeat the settings it was begun with "
        "to continue it, or choose another folder",
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an OS lock on a file that contains our process id; the OS frees it if we are killed."""
    path = folder / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if sys.platform != "win32":  # Windows has no flock: there the user must take care
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = path.read_text(encoding="utf-8").strip() or "unknown"
                raise UserError(
                    f"{folder} is in use by process {owner}; wait for it, or choose another folder"
                ) from None
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def _write_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Write the meaning of the token ids into the folder atomically."""
    draft = folder / f".{VOCABULARY}.draft"
    save_vocabulary(vocabulary, draft)
    os.replace(draft, folder / VOCABULARY)
